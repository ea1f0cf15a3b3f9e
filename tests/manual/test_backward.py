"""``ms.manual.dual_stream_backward``: the gradients of PyTorch, whatever the layer."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import millstream as ms
from millstream.errors import ArgumentError
from millstream.manual import dual_backward
from tests.device.virtual_device import make_virtual_context
from tests.manual.virtual_torch import VirtualTorch

LAYERS = {
    "linear": (nn.Linear(6, 4), (3, 6)),
    "linear of a sequence": (nn.Linear(6, 4, bias=False), (2, 3, 6)),
    "1d": (nn.Conv1d(4, 6, 3, 2, 1), (2, 4, 9)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    "circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 9, 9)),
    "same": (nn.Conv2d(4, 6, 4, padding="same"), (2, 4, 9, 9)),
    "unbatched": (nn.Conv2d(4, 6, 3), (4, 9, 9)),
    "3d": (nn.Conv3d(2, 3, 2), (2, 2, 5, 5, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1), (2, 4, 5, 5)),
}


def gradients(layer, x, **options):
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], **options)]


def agree(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_pytorchs(name):
    layer, shape = LAYERS[name]
    x = torch.randn(shape, requires_grad=True)
    expected = gradients(layer, x)
    dual = ms.manual.dual_stream_backward(copy.deepcopy(layer))
    assert type(dual) is not type(layer)
    assert isinstance(dual, type(layer))
    assert agree(gradients(dual, x), expected)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_parts_that_need_no_gradient(frozen):
    layer = ms.manual.dual_stream_backward(nn.Conv2d(2, 3, 3))
    x = torch.randn(1, 2, 5, 5, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    layer(x).sum().backward()
    assert [t.grad is None for t in (x, layer.weight, layer.bias)].count(True) == 1


def test_autocast_is_pytorchs():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 4))
    x = torch.randn(2, 2, 5, 5)
    sides = []
    for enabled in (False, True):
        ms.manual.dual_stream_backward(model, enabled=enabled)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), torch.tensor([0, 1]))
        sides.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert agree(*sides)
    assert type(model[0]) is dual_backward.DualConv2d


def test_gradients_of_gradients():
    layer = ms.manual.dual_stream_backward(nn.Linear(2, 2).double())
    x = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).tanh(), [x])


def test_layers_are_copied_saved_and_given_back():
    layer = ms.manual.dual_stream_backward(nn.Conv2d(2, 3, 3))
    assert type(pickle.loads(pickle.dumps(layer))) is dual_backward.DualConv2d
    assert layer.state_dict().keys() == nn.Conv2d(2, 3, 3).state_dict().keys()
    assert type(ms.manual.dual_stream_backward(layer, enabled=False)) is nn.Conv2d


def test_transformed_and_compiled_layers_are_pytorchs():
    layer = ms.manual.dual_stream_backward(nn.Linear(2, 2))
    x = torch.randn(3, 2)

    def loss(weight):
        return torch.func.functional_call(layer, {"weight": weight, "bias": layer.bias}, (x,)).square().sum()

    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    torch.testing.assert_close(torch.func.grad(loss)(layer.weight.detach()), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_no_module_is_refused():
    with pytest.raises(ArgumentError, match="module"):
        ms.manual.dual_stream_backward([nn.Linear(1, 1)])


@pytest.fixture
def beside(monkeypatch):
    """Layers run on a virtual device, with the auxiliary stream as late or as early as it may be."""

    def run(mood, function, *values, most_pending=4):
        context, device = make_virtual_context(mood, seed=2)
        sides = dual_backward._Sides()
        side = dual_backward._Side(context, device.default)
        monkeypatch.setattr(sides, "find", lambda x: side)
        monkeypatch.setattr(dual_backward, "_sides", sides)
        monkeypatch.setattr(dual_backward, "MOST_PENDING", most_pending)
        with VirtualTorch(device) as virtual:
            results = function(*[virtual.tensor(value) for value in values])
            device.default.wait_event(recorded(context, side.stream))  # as autograd does at the end
            return [virtual.read(result) for result in results], side

    return run


def recorded(context, stream):
    event = context.events.acquire()
    event.record(stream)
    return event


@pytest.mark.parametrize("most_pending", [1, 4])
@pytest.mark.parametrize("mood", ["eager", "lazy", "random"])
def test_layers_one_after_another_on_two_streams(mood, most_pending, beside):
    torch.manual_seed(0)
    values = [torch.randn(4, 4) for _ in range(7)]

    def train(x, *weights):
        x = x.requires_grad_()
        weights = [weight.requires_grad_() for weight in weights]
        y = x
        for weight in weights:
            y = torch.tanh(dual_backward._apply(dual_backward._Linear, y, weight, None))
        return torch.autograd.grad(y.square().sum(), [x, *weights])

    expected_weights = [value.clone().requires_grad_() for value in values]
    y = expected_weights[0]
    for weight in expected_weights[1:]:
        y = torch.tanh(F.linear(y, weight))
    expected = torch.autograd.grad(y.square().sum(), expected_weights)
    results, side = beside(mood, train, *values, most_pending=most_pending)
    assert agree(results, expected)
    assert not side._pending, "all is let go when the pass is over"


def test_short_memory_computes_one_after_the_other(beside):
    def train(x, weight):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = dual_backward._apply(dual_backward._Linear, x, weight, None)
        side = dual_backward._sides.find(x)
        allocate, main = side.context._driver.allocate, side.main

        def refuse(num_bytes):
            if side.context.current_stream() is not main:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return allocate(num_bytes)

        side.context._driver.allocate = refuse
        return torch.autograd.grad(y.square().sum(), [x, weight])

    values = torch.randn(3, 4), torch.randn(2, 4)
    expected_x, expected_w = (value.clone().requires_grad_() for value in values)
    expected = torch.autograd.grad(F.linear(expected_x, expected_w).square().sum(), [expected_x, expected_w])
    results, _ = beside("lazy", train, *values)
    assert agree(results, expected)
