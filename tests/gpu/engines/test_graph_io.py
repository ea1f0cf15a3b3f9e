"""On a GPU: inputs and results that a graph copies itself, from and to other places in each launch."""

import os
import subprocess
import sys

import pytest
import torch

import millstream as ms
from millstream.api import executables
from tests import networks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

COUNT = 40


def batches(seed=0):
    torch.manual_seed(seed)
    return [[tensor.cuda() for tensor in networks.example(networks.Mlp)] for _ in range(COUNT)]


def graph_io_of(compiled):
    (executable,) = executables(compiled)
    return executable._captured._graph_io


def make_step(model, optimizer):
    def step(x, y):
        return networks.train_once(model, optimizer, x, y)

    return step


@pytest.mark.parametrize("streams", [1, 4])
def test_losses_and_state_are_those_of_copies_around_the_graph(streams, monkeypatch):
    torch.manual_seed(1)
    model = networks.Mlp().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    step = ms.step(make_step(model, optimizer), strict=True, streams=streams)
    for batch in batches(1)[:4]:
        step(*batch)
    graph_io = graph_io_of(step)
    assert graph_io is not None
    # Not of its state_dict, which has step counts of its own.
    state = [*model.parameters(), *(tensor for entry in optimizer.state.values() for tensor in entry.values())]
    start = [tensor.detach().clone() for tensor in state]

    def train():
        with torch.no_grad():
            for tensor, value in zip(state, start, strict=True):
                tensor.copy_(value)
        losses = [step(*batch) for batch in batches()]  # the host runs ahead of the device, and keeps all of them
        return [*losses, *(tensor.detach().clone() for tensor in state)]

    ours = train()
    monkeypatch.setattr(graph_io, "open", lambda *_: False)
    others = train()
    assert len({loss.data_ptr() for loss in ours[:COUNT]}) == COUNT
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


def test_results_in_flight_go_each_to_its_own():
    compiled = ms.compile(lambda x: (x * 2, x.sum()), strict=True)
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.ones(64, device="cuda"))
        assert graph_io_of(compiled) is not None
        inputs = [torch.full((64,), float(i), device="cuda") for i in range(200)]
        torch.cuda._sleep(50_000_000)
        results = [compiled(x) for x in inputs]
        for i, (doubled, total) in enumerate(results):
            assert torch.equal(doubled, inputs[i] * 2)
            assert total.item() == 64 * i


def test_a_bare_replay_touches_nothing_of_the_callers():
    compiled = ms.compile(lambda x: x + 1, strict=True)
    with torch.no_grad():
        x = torch.ones(64, device="cuda")
        for _ in range(3):
            result = compiled(x)
        (executable,) = executables(compiled)
        x.zero_()
        result.fill_(7)
        executable.replay()
        assert torch.equal(result, torch.full_like(result, 7))
        assert torch.equal(compiled(x), torch.ones_like(x))


def test_inputs_of_every_kind_are_taken():
    compiled = ms.compile(lambda x, y: x * 2 + y, strict=True)
    with torch.no_grad():
        x, y = torch.randn(2, 6, 8, device="cuda").unbind()
        for _ in range(3):
            compiled(x, y)
        assert graph_io_of(compiled) is not None
        again = x.clone().requires_grad_()
        assert torch.equal(compiled(again, y), x * 2 + y)
        assert torch.equal(compiled(x, x), x * 2 + x)
        with torch.inference_mode():
            assert torch.equal(compiled(x.clone(), y.clone()), x * 2 + y)
        other = torch.randn(8, 6, device="cuda").t()  # other strides: a graph of its own, or a copy
        assert torch.equal(compiled(other, y), other * 2 + y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current_one():
    compiled = ms.compile(lambda x: x * 2, strict=True)
    with torch.no_grad():
        for i in range(6):
            x = torch.full((64,), float(i), device="cuda:1")
            assert torch.equal(compiled(x), x * 2)
        assert graph_io_of(compiled) is not None


SCRIPT = """
import warnings
import torch
import millstream as ms
warnings.simplefilter("ignore")  # of an allocator under which there are no graphs
compiled = ms.compile(lambda x: x * 2 + 1)
with torch.no_grad():
    for i in range(20):
        x = torch.full((1000,), float(i), device="cuda")
        assert torch.equal(compiled(x), x * 2 + 1), i
        large = torch.empty(i << 20, device="cuda")  # segments grow and move
print("right")
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_of_other_allocators_is_copied_right(setting):
    """Without graphs where their memory could not be given back."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split()[-1:] == ["right"], done.stderr[-2000:]
