"""Functions and classes of PyTorch, Python and libraries that are replaced after a step was captured."""

from __future__ import annotations

import builtins
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn, relu
from torch.nn import Dropout
from torch.nn.functional import softmax
from torch.utils.checkpoint import checkpoint

from millstream._torch.workarounds import without
from millstream.capture import Step
from tests.capture.worlds import interpret

HERE = sys.modules[__name__]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.layers = nn.Linear(3, 3), nn.Sequential(nn.GELU(), nn.Dropout(0.0))
        self.functions, self.name = F, "hardswish"

    def forward(self, x):
        return self.functions.silu(self.layers(self.linear(x))) + getattr(F, self.name)(x)


def forward(net, x):
    """Each term can be replaced alone."""
    import torch.special as functions

    y = x + 1
    return [
        net(x),
        F.gelu(y) + torch.tanh(x) + torch.linalg.norm(x) + torch.einsum("ij,ij->i", x, x).sum(),
        relu(y) + softmax(x, 1) + Dropout(0.0)(x) + nn.Identity()(x),
        y.square() + y * 2 + (1 - y) + x.T.sum() + F.layer_norm(x, (3,)),
        functions.expm1(x) + getattr(F, "elu")(x) + nn.init.ones_(torch.empty(3)),  # noqa: B009
        x * math.sqrt(4.0) * math.pi * max(1, 2) * float(np.array([4.0])[0] + np.sqrt(4.0)),
        checkpoint(net.linear, x, use_reentrant=False) + sum(each.sum() for each in net.parameters()),
        x * getattr(net.linear, "scale", 1) * (2 if hasattr(x, "flag") else 1),
    ]


def five(*args, **kwargs):
    return next(each for each in reversed(args) if isinstance(each, torch.Tensor)) * 5


class Other:
    silu = gelu = elu = hardswish = layer_norm = staticmethod(five)


_forward = nn.Linear.forward
_silu, _rsub, _hardswish = F.silu, torch.Tensor.__rsub__, F.hardswish

REPLACEMENTS = {
    (nn.Linear, "forward"): lambda self, x: 3 * _forward(self, x),
    (nn.Linear, "__call__"): five,
    (nn.Linear, "scale"): 3,
    (nn.Sequential, "forward"): five,
    (nn.GELU, "forward"): five,
    (nn.Identity, "forward"): five,
    (nn.Module, "_call_impl"): five,
    (nn.Module, "__call__"): five,
    (nn.Module, "parameters"): lambda self: [torch.ones(1)],
    (nn, "Identity"): lambda: five,
    (nn.init, "ones_"): lambda x: x.fill_(3.0),
    (F, "gelu"): lambda x, **_: x * 2,
    (F, "silu"): lambda x, inplace=False: 1 + _silu(x),
    (F, "linear"): five,
    (F, "elu"): five,
    (F, "hardswish"): lambda x: 1 + _hardswish(x),
    (torch, "tanh"): five,
    (torch, "einsum"): lambda *args: args[1].square() * 2,
    (torch.linalg, "norm"): torch.sum,
    (torch.special, "expm1"): five,
    (torch.Tensor, "square"): five,
    (torch.Tensor, "__mul__"): lambda x, y: torch.mul(x, y) + 1,
    (torch.Tensor, "__rsub__"): lambda x, y: 1 + _rsub(x, y),
    (torch.Tensor, "T"): property(five),
    (torch.Tensor, "flag"): True,
    (math, "sqrt"): lambda x: 7.0,
    (math, "pi"): 3.0,
    (builtins, "max"): lambda *_: 9,
    (np, "sqrt"): lambda x: 7.0,
    (np, "array"): lambda x: [7.0],
    (HERE, "relu"): five,
    (HERE, "softmax"): five,
    (HERE, "Dropout"): lambda p: five,
    (HERE, "F"): Other,
    (HERE, "max"): lambda *_: 9,  # which hides the one of Python's
    (HERE, "checkpoint"): lambda function, x, **_: five(x),
    (F.softmax, "__code__"): (lambda input, dim=None, _stacklevel=3, dtype=None: input * 5).__code__,  # noqa: A006
    (F.layer_norm, "__defaults__"): (None, None, 1.0),
}


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    net, graphs = Net(), []

    def build(gm, inputs, static):
        graphs.append(gm)
        return lambda values: [*torch.fx.Interpreter(gm).run(*values)]  # and not a module, which is called otherwise

    step = Step(forward, build=build, strict=True)
    step(net, torch.ones(2, 3))
    return step, net, graphs


@pytest.mark.parametrize("place", REPLACEMENTS, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_a_replaced_function_or_class_is_noticed(place, captured, monkeypatch):
    step, net, graphs = captured
    x = torch.arange(6.0).view(2, 3) / 7
    before, num_graphs = forward(net, x), len(graphs)
    monkeypatch.setattr(*place, REPLACEMENTS[place], raising=False)
    ours, theirs = step(net, x), forward(net, x)
    monkeypatch.undo()
    again = step(net, x)
    assert not all(map(torch.equal, theirs, before))  # it matters
    for one, other in zip((*ours, *again), (*theirs, *before), strict=True):
        torch.testing.assert_close(one, other)
    assert len(graphs) == num_graphs + 1  # when it is put back the first graph serves again


def test_without_the_guard_a_replaced_function_goes_unnoticed(monkeypatch):
    step, x = Step(lambda x: F.gelu(x), build=interpret, strict=True), torch.ones(2, 3)
    with without(["patches"]):
        before = step(x)
    monkeypatch.setattr(F, "gelu", five)
    assert torch.equal(step(x), before)
    assert len(step.graphs) == 1


def _halve(optimizer, *_, **__):
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.data.mul_(0.5)


REPLACED_IN_TRAINING = {
    (torch.optim.SGD, "step"): _halve,
    (torch.optim.SGD, "zero_grad"): _halve,
    (torch.optim.Optimizer, "zero_grad"): _halve,
    (sys.modules["torch.optim.sgd"], "sgd"): lambda parameters, *_, **__: [each.mul_(0.5) for each in parameters],
    (torch.autograd, "backward"): lambda loss, *_, **__: None,
    (torch.Tensor, "backward"): lambda loss, *_, **__: None,
    (nn.utils, "clip_grad_norm_"): lambda *_: None,
}


def test_replaced_parts_of_training_are_noticed(monkeypatch):
    def make():
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for each in net.parameters():
            each.grad = torch.zeros_like(each)

        def train(x):
            loss = net(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

        return net, train

    (ours, step), (theirs, plain) = make(), make()
    step, x = Step(step, build=interpret, strict=True), torch.ones(4, 3)
    for place, replacement in REPLACED_IN_TRAINING.items():
        for value in (vars(place[0]).get(place[1]), replacement, None):
            with monkeypatch.context() as patch:
                if value is replacement:
                    patch.setattr(*place, value)
                step(x)
                plain(x)
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(one, other, msg=str(place))
    assert len(step.graphs) == len(REPLACED_IN_TRAINING) + 1


def test_hooks_for_all_modules_are_noticed():
    net, x = nn.Linear(3, 2), torch.ones(2, 3)
    step = Step(lambda x: net(x), build=lambda gm, *_: lambda values: [*torch.fx.Interpreter(gm).run(*values)])
    step(x)
    for register, hook in (
        (nn.modules.module.register_module_forward_hook, lambda module, args, result: result * 3),
        (nn.modules.module.register_module_forward_pre_hook, lambda module, args: (args[0] * 3,)),
    ):
        handle = register(hook)
        try:
            torch.testing.assert_close(step(x), net(x).detach())
        finally:
            handle.remove()
        torch.testing.assert_close(step(x), net(x).detach())
    assert not step.fallbacks


def test_what_changes_by_itself_in_pytorch_and_python_costs_no_graph():
    import copy
    import pickle

    net, x = nn.Linear(3, 2), torch.ones(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = Step(lambda x: net(x).square().mean(), build=interpret, strict=True)
    step(x)
    copy.deepcopy(net)  # notes the slots of the class in it
    pickle.dumps(net)
    nn.Linear.__annotations__  # noqa: B018  likewise
    copy.deepcopy(optimizer)
    torch.optim.Adagrad(net.parameters())  # the first of its class, of which PyTorch wraps the step
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1))
    with torch.random.fork_rng(), np.errstate():
        step(x)
    vars(builtins)["_"] = None  # as an interactive session does
    del vars(builtins)["_"]
    step(x)
    assert len(step.graphs) == 1


def test_a_function_is_called_once_by_what_has_replaced_it(monkeypatch):
    dropout, backward, pool = F.dropout, torch.Tensor.backward, F.max_pool1d
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.MaxPool1d(3)), torch.ones(2, 3)
    monkeypatch.setattr(F, "dropout", lambda *args, **kwargs: 2 * dropout(*args, **kwargs))
    monkeypatch.setattr(F, "max_pool1d", lambda *args, **kwargs: 2 * pool(*args, **kwargs))
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backward(2 * loss))

    def train(x):
        loss = net(x).sum()
        loss.backward()
        return loss

    expected = train(x)
    gradients = [each.grad.clone() for each in net.parameters()]
    net.zero_grad()
    torch.testing.assert_close(Step(train, build=interpret, strict=True)(x), expected.detach())
    for each, gradient in zip(net.parameters(), gradients, strict=True):
        torch.testing.assert_close(each.grad, gradient)
    monkeypatch.setattr(F, "dropout", torch.sigmoid)  # which is not called
    torch.testing.assert_close(Step(lambda: dropout(x, 0.0) + 1, build=interpret, strict=True)(), x + 1)
