"""Steps are spared what is for graphs of torch functions; custom operators are still watched in their first run."""

import gc
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

import millstream as ms
from millstream.lower.inductor import fx_wrapper, generated_kernels
from millstream.lower.inductor.shortcuts import garbage, no_collections


@torch.library.custom_op("millstream_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.fixture
def watched(monkeypatch):
    """Operators that AOT autograd has watched, and graphs that passes before autograd have had."""
    operators, graphs = [], []
    watch, run = _AnalyzeCustomOpInputOutputMode.__torch_dispatch__, compile_fx.pre_grad_passes

    def note(self, func, types, args=(), kwargs=None):
        operators.append(func)
        return watch(self, func, types, args, kwargs)

    monkeypatch.setattr(_AnalyzeCustomOpInputOutputMode, "__torch_dispatch__", note)
    monkeypatch.setattr(compile_fx, "pre_grad_passes", lambda gm, *rest: graphs.append(gm) or run(gm, *rest))
    return operators, graphs


def trained(function):
    """The loss after two calls of a step, and the weight."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @ms.step(strict=True)
    def step(x):
        loss = function(model(x)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def eager(x):
        loss = function(model(x)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.ones(4, 3)
    losses = [run(x).item() for run in (step, step)]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert losses == pytest.approx([eager(x).item() for _ in range(2)])


def test_the_first_run_of_a_step_is_not_watched_and_its_graph_has_no_passes_before_autograd(watched):
    operators, graphs = watched
    trained(torch.tanh)
    assert not operators
    assert not graphs


def test_custom_operators_are_watched(watched):
    operators, _ = watched
    trained(doubled)
    assert torch.ops.millstream_tests.doubled.default in operators


def test_switched_off_the_first_run_is_watched_and_passes_run(watched, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "shortcuts")
    operators, graphs = watched
    trained(torch.tanh)
    assert operators
    assert graphs


@pytest.mark.parametrize("size", [((2, 3), (3, 1)), ((4, 1), (1, 4)), ((), ()), ((2, 0), (1, 1))])
def test_what_is_allocated_is_as_pytorch_says(size):
    with FakeTensorMode() as mode:
        expected = torch.empty_strided(*size, dtype=torch.half, device="cpu")
    made = fx_wrapper._allocated(mode, *size, dtype=torch.half, device="cpu")
    for each in ("shape", "dtype", "device", "layout", "fake_mode"):
        assert getattr(made, each) == getattr(expected, each)
    assert made.stride() == expected.stride()


def kernels_of(monkeypatch, *, is_done):
    """Import a kernel that another process has compiled, or still compiles."""
    future = Future()
    if is_done:
        future.set_result(None)
    kernel = SimpleNamespace(future=future, result=lambda: len)
    monkeypatch.setattr(generated_kernels.PyCodeCache, "load", lambda code: SimpleNamespace(kernel=kernel))
    return generated_kernels._import_definitions("", [("kernel", "", None)])


@pytest.mark.parametrize("is_done", [True, False])
def test_garbage_is_looked_for_while_kernels_compile(monkeypatch, is_done):
    collected = []
    monkeypatch.setattr(garbage.gc, "collect", lambda: collected.append(None))
    kernels_of(monkeypatch, is_done=is_done)
    assert not collected  # Python looks for it itself
    with no_collections():
        assert kernels_of(monkeypatch, is_done=is_done) == {"kernel": (len, "")}
    assert bool(collected) != is_done
    collected.clear()
    gc.disable()
    try:
        with no_collections():
            kernels_of(monkeypatch, is_done=is_done)
    finally:
        gc.enable()
    assert not collected
