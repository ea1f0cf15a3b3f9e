"""Random programs with control flow give eager PyTorch's values and gradients, on every engine the same bits."""

import os
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

import millstream as ms
from tests.api.random_control import Operators, Plain, Program

FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "3"))
FIRST = int(os.environ.get("MILLSTREAM_FUZZ_SEED", "0"))
ENGINES = "serial", "threads"
NUM_CALLS = 4  # of a step, the first is eager unless it is found on disk
LIKE_EAGER = {"fallback_random": True}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FUZZ))
def test_values_and_gradients_are_those_of_plain_python(seed, lowered_once):
    wanted = results_of(seed, Plain, lambda function: function)
    found = []
    for engine in ENGINES:
        torch._dynamo.reset()
        with torch._inductor.config.patch({"cpp.simdlen": 1}):  # which is written in half the time
            wrap = partial(ms.step if seed % 4 < 2 else ms.compile, engine=engine, strict=True, options=LIKE_EAGER)
            found.append(results_of(seed, Operators, wrap))
    for ours, theirs in zip(*map(tree_leaves, (found[0], wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert all(map(torch.equal, *map(tree_leaves, (each[1:] for each in found))))


def results_of(seed, flow, wrap, device="cpu"):
    """What a program gives in each call, and what it leaves behind; odd seeds are those with gradients."""
    has_gradients = seed % 2 == 1
    program = Program(seed, flow, has_gradients=has_gradients, device=device)
    call = trained(program.run, wrap, is_step=seed % 4 < 2) if has_gradients else torch.no_grad()(wrap(program.run))
    results = []
    torch.manual_seed(seed)
    for number in range(NUM_CALLS):
        generator = torch.Generator().manual_seed(seed + number)
        given = [torch.randn(3, 4, dtype=torch.float64, generator=generator).to(device) for _ in range(2)]
        results.append(call(*given))
    return [*results, program.buffers, torch.get_rng_state()]


def trained(run, wrap, *, is_step):
    """A function with gradients of what it is given: all of it wrapped, or its forward pass."""
    forward = run if is_step else wrap(run)

    def step(*given):
        given = [each.clone().requires_grad_() for each in given]
        result = forward(*given)
        grads = torch.autograd.grad(result.square().sum(), given, allow_unused=True, materialize_grads=True)
        return [result.detach(), *grads]

    return wrap(step) if is_step else step
