"""Errors from inside PyTorch's compiler: another try without what failed, else operator, line and issue are named."""

import warnings

import pytest
import torch
from torch._inductor import scheduler

import millstream as ms
from millstream.lower import compile as compiling
from millstream.lower.workarounds import without


def chain(x):
    return torch.softmax(torch.tanh(x) * 2, 1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def fusion_fails(monkeypatch):
    """Inductor fails on any two kernels that it fuses."""

    def fail(self, node1, node2, *args):
        raise KeyError("buf7")

    monkeypatch.setattr(scheduler.Scheduler, "fuse_two_nodes", fail)


def two_kernels(x):
    return torch.nn.functional.layer_norm(x, (4,))


def test_a_fusion_that_fails_is_left_out(fusion_fails):
    x = torch.randn(3, 4)
    with pytest.raises(Exception, match="buf7"):
        torch.compile(two_kernels)(x)
    torch._dynamo.reset()
    torch.testing.assert_close(ms.compile(two_kernels, strict=True)(x), two_kernels(x))


def test_a_pattern_that_fails_is_left_out():
    x = torch.arange(4.0)
    with without(["pytorch#183988"]):
        result = ms.compile(lambda x: x[torch.randperm(4)], strict=True)(x)
    assert torch.equal(result.sort().values, x)


@pytest.fixture
def tanh_fails(monkeypatch):
    """Inductor fails on an operator, whatever is left out."""
    from torch._inductor import lowering

    def fail(x):
        raise KeyError("tanh")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.tanh.default, fail)


def test_the_reason_names_operator_and_line(tanh_fails):
    x, line = torch.randn(3, 4), chain.__code__.co_firstlineno + 1
    with pytest.warns(
        ms.FallbackWarning, match=rf"KeyError.*aten.tanh.*at .*test_failures.py:{line} in chain"
    ) as caught:
        torch.testing.assert_close(ms.compile(chain)(x), chain(x))
    assert len([each for each in caught if "on plain torch.compile" in str(each.message)]) == 1
    torch._dynamo.reset()
    with pytest.raises(ms.CaptureError, match=r"aten.tanh") as error:
        ms.compile(chain, strict=True)(x)
    assert error.value.where.endswith(f"test_failures.py:{line} in chain")


def test_a_step_names_operator_and_line(tanh_fails):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = torch.tanh(x * weight).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = ms.step(step)
    with torch.enable_grad(), pytest.warns(ms.FallbackWarning, match=r"aten.tanh.*test_failures.py:\d+ in step"):
        for _ in range(3):
            captured(torch.ones(2, 4))


def test_what_fails_before_lowering_runs_as_python(monkeypatch):
    def fail(*_, **__):
        raise KeyError("joint")

    monkeypatch.setattr(compiling, "compile_fx", fail)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.enable_grad():
        with pytest.warns(ms.FallbackWarning, match="as plain Python.*KeyError: 'joint'"):
            compiled = ms.compile(chain)
            result = compiled(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(x)
        (gradient,) = torch.autograd.grad(result[0, 0], x)
        torch.testing.assert_close(gradient, torch.autograd.grad(chain(x)[0, 0], x)[0])
    torch._dynamo.reset()
    with pytest.raises(ms.CaptureError, match="joint"):
        ms.compile(chain, strict=True)(x)


def test_a_reported_error_names_its_issue(monkeypatch):
    """As where the pattern cannot be left out, either."""
    monkeypatch.setattr(compiling, "other_tries", lambda error: ())
    with without(["pytorch#183988"]), pytest.warns(ms.FallbackWarning, match=r"as plain Python.*pytorch#183988"):
        result = ms.compile(lambda x: x[torch.randperm(4)])(torch.arange(4.0))
    assert torch.equal(result.sort().values, torch.arange(4.0))
