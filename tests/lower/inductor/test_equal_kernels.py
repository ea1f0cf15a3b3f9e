"""Kernels that are equal but for the names of buffers are generated once, and come out as each would by itself.

``MILLSTREAM_FUZZ=300`` writes so many random programs, from ``MILLSTREAM_FUZZ_SEED`` on.
"""

import contextlib
import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import TritonKernel

import millstream as ms
from millstream.lower.inductor.cpp_kernels import CppKernels
from millstream.lower.inductor.once import equal_kernels, equal_parts
from millstream.lower.inductor.shortcuts import shortcuts
from tests import networks
from tests.lower.inductor.texts import text_of

DEVICES = ("cpu", "cuda")
FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "2"))
WRONG_ONCE = 5019
FIRST = int(os.environ.get("MILLSTREAM_FUZZ_SEED", "0"))
SEEDED = torch.ops.prims


@pytest.fixture
def taken(monkeypatch):
    """How many kernels have been taken again, by the language that they are in."""
    counts = {"cpu": 0, "cuda": 0}

    def count(module, name, device):
        take = getattr(module, name)

        def take_and_count(*args):
            counts[device] += 1
            return take(*args)

        monkeypatch.setattr(module, name, take_and_count)

    count(equal_kernels, "_take_cpp", "cpu")
    count(equal_kernels, "_take_triton", "cuda")
    count(equal_parts, "_take_part", "cuda")
    return counts


@contextlib.contextmanager
def less_work():
    with shortcuts(), equal_kernels.equal_kernels():
        yield


def both_texts(function, inputs, device):
    """What is written for a function, each kernel by itself and with all work, and equal ones once."""
    return [text_of(function, inputs, device, each) for each in (contextlib.nullcontext, less_work)]


def block(x, weight, other, factors, seeds, number):
    """Sums, a normalisation, products in between, a mask that is drawn, and one element of a stack."""
    hidden = F.layer_norm(x, x.shape[-1:], weight, other) @ x.mT @ x
    chosen = SEEDED.inductor_random([*x.shape], SEEDED.inductor_lookup_seed(seeds, number), "rand") > 0.1
    scores = torch.softmax(hidden * factors[number], -1) * chosen
    return x + F.gelu(scores @ other.diag()) + F.pad(scores, (1, -1)), scores.square().sum(0)


def network(x, factors, table, rows, *weights):
    """Several equal layers, then what is not described (a running sum), and updates in place of what was given."""
    seeds, sums = SEEDED.inductor_seeds(40, torch.device("cpu")), []
    for number, (weight, other) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        x, total = block(x, weight, other, factors, seeds, 3 * number)
        sums.append(total + table[rows + number].sum(0))
    updated = [weight.mul_(0.5).add_(total) for weight, total in zip(weights[::2], sums, strict=True)]
    return x.cumsum(0), x.mT.contiguous(), *updated


def network_inputs(layers=3, size=32):
    weights = [torch.ones(size) for _ in range(2 * layers)]
    return [torch.ones(24, size), torch.ones(40), torch.ones(9, size), torch.arange(4), *weights]


@pytest.mark.parametrize("device", DEVICES)
def test_equal_kernels_are_written_to_the_letter(device, taken):
    alone, once = both_texts(network, network_inputs(), device)
    assert alone == once
    assert taken[device] >= 4


def with_counts(counts, *values):
    """An optimizer that counts steps, of which each item of a list reads its own."""
    return torch._foreach_sub(values, [value.sin() * counts[at] for at, value in enumerate(values)])


def test_equal_parts_of_one_kernel_are_taken(taken):
    alone, once = both_texts(with_counts, [torch.ones(5), *(torch.ones(32, 32) for _ in range(5))], "cuda")
    assert alone == once
    assert taken["cuda"] >= 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :31].contiguous(),  # another size
        lambda x: x.double(),
        lambda x: x.mT.contiguous().mT,  # other strides
    ],
    ids=["size", "dtype", "strides"],
)
def test_kernels_that_differ_in_more_than_names_are_not_equal(device, change, taken):
    def function(x, y):
        return x.sin().sum(1), y.sin().sum(1)

    x = torch.ones(32, 32)
    alone, once = both_texts(function, [x, change(x)], device)
    assert alone == once
    assert not taken[device]
    both_texts(function, [x, x.clone()], device)
    assert taken[device]


def needed_elsewhere(x, y, weight):
    results = []
    for value, is_needed in ((x, False), (y, True), (x + y, False)):
        largest = (value @ weight).amax(1, keepdim=True)
        results += [(value - largest).exp().sum(0), *([largest] if is_needed else [])]
    return results


def overwritten(x, y, weight):
    kept, lost = x @ weight, y @ weight
    last = torch.relu(lost)  # in the memory of the product, as nothing else needs that
    return torch.relu(kept) @ weight, last @ weight, kept


def of_another_dtype(x, y, weight):
    return torch.relu(x), torch.relu(weight @ weight), torch.relu(y.double() @ weight.double())


def written_in_the_same_kernel(x, y, weight):
    """Of two that are turned, one is an argument, and the other one is written in the kernel that reads it."""
    early = y.sin()
    late = (early @ weight).sin()
    return early, late, late.mT.contiguous(), early.mT.contiguous()


def in_one_buffer(x, y, weight):
    """Of parts of one buffer, some do not begin where the memory is aligned."""
    parts = [(value @ weight).sum(0)[:30] for value in (x, y, weight, x + y)]
    return torch.cat(parts), torch.stack([part.sum() for part in parts])


def in_lists(x, y, weight):
    """An optimizer's step: on a GPU one kernel has a part for each item of a list."""
    values = [x, y, weight, *(each[:number] for number, each in enumerate([x, y, weight], 3))]
    gradients = [value.sin() * 0.5 for value in values]
    moments = torch._foreach_lerp(values, gradients, 0.1)
    squares = torch._foreach_addcmul(values, gradients, gradients, value=0.01)
    steps = torch._foreach_div(moments, [root + weight[1, 2] for root in torch._foreach_sqrt(squares)])
    return *torch._foreach_sub(values, steps), *moments, *squares, torch.stack(torch._foreach_norm(gradients)).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "function",
    [needed_elsewhere, overwritten, of_another_dtype, written_in_the_same_kernel, in_one_buffer, in_lists],
    ids=lambda f: f.__name__,
)
def test_what_becomes_of_a_buffer_counts(device, function):
    alone, once = both_texts(function, [torch.ones(32, 32) for _ in range(3)], device)
    assert alone == once


def random_function(seed):
    """A function of tensors that repeats some random operations on random ones of what there is so far."""
    choose = random.Random(seed)
    unary = [torch.sin, torch.exp, torch.relu, lambda x: x * 0.5, lambda x: x.sum(0, keepdim=True), lambda x: x.amax(1)]
    unary += [lambda x: x.mT.contiguous(), lambda x: torch.softmax(x, -1), lambda x: x.cumsum(0), lambda x: x.flip(1)]
    unary += [lambda x: F.pad(x, (1, 2)), lambda x: x.var(1), lambda x: x[::2], lambda x: x.double() * 3]
    unary += [lambda x: x > 0.5]
    binary = [torch.add, torch.mul, torch.maximum, lambda x, y: torch.where(x > 0, x, y), lambda x, y: x + y.sin()]
    program = [(choose.choice([1, 1, 2]), choose.random(), choose.random(), choose.random()) for _ in range(7)]
    repeats, is_in_place = choose.choice([2, 3, 4]), choose.random() < 0.3

    def function(*inputs):
        results = []
        for number in range(repeats):
            values = [inputs[number % len(inputs)], inputs[-1]]
            for arity, first, second, which in program:
                x = values[int(first * len(values))]
                y = values[int(second * len(values))]
                kinds = unary if arity == 1 or x.shape != y.shape else binary
                value = kinds[int(which * len(kinds))](*([x] if kinds is unary else [x.float(), y.float()]))
                values.append(value.float() if value.dim() == 2 else value.float().unsqueeze(-1))
            results += values[-2:]
            if is_in_place:
                inputs[number % len(inputs)].add_(values[-1].float().mean())
        return results

    shape = choose.choice([(8, 8), (16, 5), (33, 64)])
    return function, [torch.ones(shape) for _ in range(choose.choice([2, 5]))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [*range(FIRST, FIRST + FUZZ), WRONG_ONCE])
def test_random_programs_are_written_to_the_letter(seed, device):
    alone, once = both_texts(*random_function(seed), device)
    assert alone == once


def random_lists(seed):
    """A function of tensors that does random operations on lists of them, and on single items in between."""
    choose = random.Random(seed)
    unary = [torch._foreach_sqrt, torch._foreach_neg, torch._foreach_exp, lambda x: torch._foreach_mul(x, 0.5)]
    binary = [torch._foreach_add, torch._foreach_mul, torch._foreach_sub, torch._foreach_maximum]
    binary += [lambda x, y: torch._foreach_lerp(x, y, 0.1), lambda x, y: torch._foreach_addcmul(x, y, y, value=2)]
    shapes = [choose.choice([(8, 8), (4, 16), (33,), (2, 3, 5), (64,)]) for _ in range(choose.choice([3, 6, 12]))]
    dtypes = [choose.choice([torch.float32] * 3 + [torch.bfloat16]) for _ in shapes]
    program = [(choose.random(), choose.random(), choose.random(), choose.random()) for _ in range(6)]
    is_in_place, is_turned = choose.random() < 0.5, choose.random() < 0.3

    def function(*inputs):
        lists = [
            [*inputs],
            [x.sin() if at % 2 or x.dim() != 2 else x.mT.contiguous().mT for at, x in enumerate(inputs)],
        ]
        for kind, which, first, second in program:
            x, y = (lists[int(place * len(lists))] for place in (first, second))
            kinds = unary if kind < 0.3 else binary
            values = [*kinds[int(which * len(kinds))](*([x] if kinds is unary else [x, y]))]
            if kind > 0.9:
                values[0] = values[0] * values[-1].mean()
            lists.append(values)
        if is_in_place:
            torch._foreach_copy_([*inputs], lists[-1])
            inputs[0].mul_(inputs[0].amax())
        kept = [lists[-1], lists[len(lists) // 2]]
        return [x.mT.contiguous() if is_turned and x.dim() == 2 else x for values in kept for x in values]

    return function, [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FUZZ))
def test_random_lists_are_written_to_the_letter(seed):
    alone, once = both_texts(*random_lists(seed), "cuda")
    assert alone == once


@pytest.mark.parametrize(("kind", "device"), [*zip(networks.ALL, itertools.cycle(DEVICES), strict=False)])
def test_training_steps_of_networks_are_written_to_the_letter(kind, device):
    model, (x, labels) = torch.func.replace_all_batch_norm_modules_(kind()), networks.example(kind)
    names, values = zip(*model.named_parameters(), strict=True)

    def train(x, labels, *values):
        trained = [value.detach().requires_grad_() for value in values]
        loss = F.cross_entropy(torch.func.functional_call(model, dict(zip(names, trained, strict=True)), (x,)), labels)
        gradients = torch.autograd.grad(loss, trained)
        return loss, *(value.detach() - 0.1 * each for value, each in zip(trained, gradients, strict=True))

    alone, once = both_texts(train, [x, labels, *(value.detach() for value in values)], device)
    assert alone == once


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.expand, self.dropout = nn.LayerNorm(size), nn.Linear(size, size), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.expand(self.norm(x))))


def test_a_step_gives_the_same_bits_and_has_the_same_kernels(monkeypatch, taken):
    sources, add = [], CppKernels.add

    def note(self, name, definition):
        sources.append((name, definition))
        add(self, name, definition)

    monkeypatch.setattr(CppKernels, "add", note)
    results = []
    for without in ("equal-kernels", ""):
        monkeypatch.setenv("MILLSTREAM_WITHOUT", without)
        torch.manual_seed(0)
        sources.clear()
        model = nn.Sequential(*(Layer(24) for _ in range(2)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        @ms.step(strict=True)
        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = [step(torch.randn(16, 24)) for _ in range(3)]
        results.append(([*sources], losses, [*model.state_dict().values()]))
        assert bool(taken["cpu"]) == (not without)
    (sources_alone, *alone), (sources_once, *once) = results
    assert sources_alone == sources_once
    assert all(torch.equal(a, b) for one, two in zip(alone, once, strict=True) for a, b in zip(one, two, strict=True))


def test_switched_off_nothing_is_changed(monkeypatch):
    def functions():
        whole, part = SIMDScheduling.codegen_node_schedule, SIMDScheduling.codegen_node_schedule_with_kernel
        return CppScheduling.codegen_node, whole, part, TritonKernel.codegen_kernel

    before = functions()
    with equal_kernels.equal_kernels():
        assert not {*before} & {*functions()}
    assert functions() == before
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "equal-kernels")
    with equal_kernels.equal_kernels():
        assert functions() == before
