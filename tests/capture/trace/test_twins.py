"""What the step's code meets is always the user's own tensors, whichever of PyTorch's ways it is called by."""

import cmath

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DisableTorchFunction  # by this name a trace does not see it
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from millstream.capture import Step
from millstream.capture.state import extensions
from millstream.errors import CaptureError
from tests.capture.worlds import World, check, interpret


class Scaled(torch.autograd.Function):
    """A product, times the first of ``known`` that either tensor is."""

    @staticmethod
    def forward(ctx, x, weight, known):
        ctx.known = known
        ctx.save_for_backward(x, weight)
        return x * weight * known.get(weight, 1.0)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        scale = ctx.known.get(weight, 1.0) * weight.scale
        return gradient * weight * scale, gradient * x * scale, None


class InTwoParts(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, known):
        return x * weight * known.get(weight, 1.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, known = inputs
        ctx.save_for_backward(x, weight)
        ctx.scale = known.get(weight, 1.0)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight * ctx.scale, gradient * x * ctx.scale, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class SineOf(TorchDispatchMode):
    """Sines of one tensor are others, as long as that has no gradient."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_known = func is torch.ops.aten.sin.default and args[0] is self.weight
        return result * (3.0 if self.weight.grad is None else 5.0) if is_known else result


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.linspace(0.5, 1, 4)), nn.Parameter(torch.ones(4))
        self.register_buffer("buffer", torch.ones(4))
        self.weight.scale = 0.5


def meeting(use):
    """A world in which a loss is made by ``use`` of weights, a dict by them and an argument; and then once more."""

    def make():
        model = Weights()
        known = {model.weight: 2.0, model.other: 3.0}
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(x):
            for _ in range(2):  # the second time there are gradients
                loss = use(model, known, x)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return World(step, [model], [optimizer])

    return make


def autograd_functions(model, known, x):
    x = Scaled.apply(x, model.weight, known) + InTwoParts.apply(x, model.other, known)
    doubled = Doubled.apply(model.buffer)
    x = x * (model.buffer.clone() if doubled is model.buffer else 0)
    model.buffer.clamp_(max=4)
    return x.sum()


def hooks_on_saved_tensors(model, known, x):
    def pack(saved):
        if saved in known:
            return saved
        return saved * (1.0 if model.weight.grad is None else 0.5) * model.other.detach()

    with saved_tensors_hooks(pack, lambda saved: saved * known.get(saved, 1.0)):
        return (model.weight.square() * x * model.other).sum()


def dispatch_modes(model, known, x):
    with SineOf(model.weight):
        return (model.weight.sin() * x).sum() + (model.other.sin() * x).sum()


def functions_that_pytorch_calls(model, known, x):
    def distance(left, right):
        return ((left - right) * model.other).square().sum(-1) * (1.0 if model.weight.grad is None else 2.0)

    rows = (x * model.weight).view(1, -1)
    return F.triplet_margin_with_distance_loss(rows, rows * 2, rows * 3, distance_function=distance)


def transforms(model, known, x):
    gradient, given = torch.func.grad(lambda buffer: ((buffer * x).sin().sum(), buffer), has_aux=True)(model.buffer)
    return (gradient * model.weight * (2.0 if given is model.buffer else 1.0)).sum() + model.other.sum()


def function_modes_off(model, known, x):
    model.buffer.requires_grad_(True)
    with torch._C.DisableTorchFunction():
        has_gradient = model.weight.grad is not None
        product = model.buffer * x
        with torch.no_grad():
            model.other.mul_(0.9)
    scale = (2.0 if has_gradient else 1.0) * (3.0 if product.requires_grad else 1.0)
    model.buffer.requires_grad_(False)
    return (product.detach() * model.weight).sum() * scale + model.other.sum()


def new_parameters(model, known, x):
    leaf = nn.Parameter(model.buffer)
    (gradient,) = torch.autograd.grad((leaf.square() * x).sum(), leaf)
    model.buffer.mul_(0.9)
    return (gradient * model.weight).sum() + (nn.Parameter(model.other) * x).detach().sum() * model.other.sum()


MEETING = [
    autograd_functions,
    hooks_on_saved_tensors,
    dispatch_modes,
    functions_that_pytorch_calls,
    transforms,
    function_modes_off,
    new_parameters,
]


@pytest.mark.parametrize("use", MEETING, ids=[use.__name__ for use in MEETING])
def test_code_that_pytorch_calls_meets_the_users_own_tensors(use):
    check(meeting(use), [(torch.linspace(0.1, 1, 4) + number,) for number in range(3)])


def leaves_of_the_graph(weight):
    return (weight * 2).grad_fn.next_functions[0][0].variable is weight


def numpy_by_dlpack(weight):
    return np.from_dlpack(weight.detach()).sum()


def memory_of_another(weight):
    torch._C._swap_tensor_impl(weight, weight * 2)


REFUSED = {
    leaves_of_the_graph: "autograd's graph",
    numpy_by_dlpack: "by DLPack",
    memory_of_another: "other memory with _swap_tensor_impl",
}


@pytest.mark.parametrize("use", REFUSED, ids=[use.__name__ for use in REFUSED])
def test_what_would_meet_the_values_of_before_is_refused(use):
    weight = nn.Parameter(torch.ones(3))

    def step(x):
        use(weight)
        return x * weight

    with pytest.raises(CaptureError, match=REFUSED[use]):
        Step(step, build=interpret, strict=True)(torch.ones(3))
    assert type(weight) is nn.Parameter
    assert weight.tolist() == [1, 1, 1]


def test_a_gradient_that_is_asked_for_in_the_step_is_not_lost_past_function_modes():
    weight = torch.ones(3)

    def step(x):
        weight.requires_grad_(True)
        with DisableTorchFunction():
            loss = (x * weight).sum()
        weight.requires_grad_(False)
        return x * loss.requires_grad

    with pytest.raises(CaptureError, match="no mode sees"):
        Step(step, build=interpret, strict=True)(torch.ones(3))


def test_extension_of_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(extensions, "_KNOWN", frozenset())
    monkeypatch.setattr(extensions, "_is_extension", lambda module: module == "cmath")

    with pytest.raises(CaptureError, match=r"calls sqrt\(\), C\+\+ code"):
        Step(lambda x: x * abs(cmath.sqrt(2)), build=interpret, strict=True)(torch.ones(3))


def test_extensions_of_pytorch_are_told_from_others():
    assert extensions._is_extension("torch._C")
    assert not extensions._is_extension("math")
    assert not extensions._is_extension("numpy.linalg._umath_linalg")
    assert not extensions.takes_tensors(torch.add)
