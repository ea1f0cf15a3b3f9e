"""On a GPU: PyTorch's switches of precision, changed after a capture, decide what a replay computes, as in eager."""

import pytest
import torch
import torch.nn.functional as F

import millstream as ms
from millstream._torch.modes import switches
from millstream.api.compiling import dynamo_backend
from millstream.engine.cuda.cuda_graph import CudaGraphEngine

pytestmark = pytest.mark.gpu

cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
MOST_IN_FLOAT32, LEAST_IN_TF32 = 1e-5, 1e-4
"""Errors of a sum of some hundred products, relative to the largest result."""


@pytest.fixture(autouse=True)
def _as_before():
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = switches.remember()
    yield
    switches.put_back(before)


def multiply(x, weight):
    return x @ weight


def convolve(x, weight):
    return F.conv2d(x.view(1, 64, 32, 32), weight.view(16, 64, 8, 8))


FORMS = {
    "set_float32_matmul_precision": (multiply, lambda on: torch.set_float32_matmul_precision(("highest", "high")[on])),
    "cuda.matmul.allow_tf32": (multiply, lambda on: setattr(matmul, "allow_tf32", on)),
    "cuda.matmul.fp32_precision": (multiply, lambda on: setattr(matmul, "fp32_precision", ("ieee", "tf32")[on])),
    "fp32_precision": (multiply, lambda on: setattr(torch.backends, "fp32_precision", ("ieee", "tf32")[on])),
    "cudnn.allow_tf32": (convolve, lambda on: setattr(cudnn, "allow_tf32", on)),
    "cudnn.conv.fp32_precision": (convolve, lambda on: setattr(cudnn.conv, "fp32_precision", ("ieee", "tf32")[on])),
}


def example():
    return torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")


def error_of(result, function, *arguments):
    exact = function(*(each.double() for each in arguments))
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


def assert_precision(result, function, arguments, *, is_tf32):
    for each in (result, function(*arguments)):  # eager's is a check of the test
        error = error_of(each, function, *arguments)
        assert error > LEAST_IN_TF32 if is_tf32 else error < MOST_IN_FLOAT32


@pytest.mark.parametrize("kind", ["step", "compile", "backend"])
@pytest.mark.parametrize("form", FORMS)
def test_replays_have_the_precision_that_eager_has(kind, form, request):
    if form == "fp32_precision" and kind != "step":
        reason = "torch.compile sets cuda.matmul.fp32_precision to what it finds: what it belongs to no longer decides"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    function, switch = FORMS[form]
    run = {
        "step": lambda: ms.step(function, strict=True),
        "compile": lambda: ms.compile(function, strict=True),
        "backend": lambda: torch.compile(function, backend=dynamo_backend, options={"strict": True}),
    }[kind]()
    arguments = example()
    for is_tf32 in (False, True, False, True):
        switch(is_tf32)
        for _ in range(4):
            assert_precision(run(*arguments), function, arguments, is_tf32=is_tf32)
    if kind == "step":
        assert len(run.graphs) == 2


def test_a_backward_pass_has_the_precision_of_its_own_time():
    model, (x, weight) = ms.compile(multiply, strict=True), example()
    weight.requires_grad_()
    upstream = torch.randn(256, 256, device="cuda")

    def gradient(result):
        return torch.autograd.grad(result, weight, upstream)[0]

    def product(x, upstream):
        return x.T @ upstream

    for is_tf32 in (False, False, False, True, False, True):
        matmul.allow_tf32 = False
        result = model(x, weight)
        matmul.allow_tf32 = is_tf32
        assert_precision(gradient(result), product, (x, upstream), is_tf32=is_tf32)


def test_one_that_another_thread_sets_while_a_graph_is_captured_is_not_captured(monkeypatch):
    original = CudaGraphEngine._capture

    def while_another_sets_it(self, inputs):
        matmul.allow_tf32 = True
        try:
            return original(self, inputs)
        finally:
            monkeypatch.setattr(CudaGraphEngine, "_capture", original)

    matmul.allow_tf32 = False
    step, arguments = ms.step(multiply, strict=True), example()
    step(*arguments)
    monkeypatch.setattr(CudaGraphEngine, "_capture", while_another_sets_it)
    step(*arguments)
    for is_tf32 in (False, True):
        matmul.allow_tf32 = is_tf32
        for _ in range(4):
            assert_precision(step(*arguments), multiply, arguments, is_tf32=is_tf32)
    assert len(step.graphs) == 2


def test_a_product_in_another_precision_within_a_step_runs_as_in_eager():
    def function(x, weight):
        matmul.allow_tf32 = True
        first = x @ weight
        matmul.allow_tf32 = False
        return first, x @ weight

    step, arguments = ms.step(function), example()
    with pytest.warns(ms.FallbackWarning, match="sets torch.backends.cuda.matmul.fp32_precision for some"):
        step(*arguments)
    for _ in range(3):
        for result, is_tf32 in zip(step(*arguments), (True, False), strict=True):
            error = error_of(result, multiply, *arguments)
            assert error > LEAST_IN_TF32 if is_tf32 else error < MOST_IN_FLOAT32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_are_made_on_the_device_that_is_current_in_the_call():
    step, x = ms.step(lambda x: (x + 1, torch.ones(3, device="cuda"))), torch.ones(3)
    for index in (0, 1, 0):
        with torch.cuda.device(index):
            for _ in range(3):
                assert step(x)[1].device.index == index


@pytest.mark.parametrize("is_on", [True, False])
def test_what_is_tuned_may_have_its_precision_in_the_newer_form(is_on):
    matmul.fp32_precision = "tf32" if is_on else "ieee"
    model, arguments = ms.compile(multiply, strict=True, mode="max-autotune"), example()
    with torch.no_grad():
        for _ in range(3):
            assert_precision(model(*arguments), multiply, arguments, is_tf32=is_on)
