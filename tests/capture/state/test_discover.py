"""Objects are found wherever a function can reach them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from millstream.capture import Step
from millstream.capture.state.discover import discover
from millstream.capture.step.capturing import retracing
from tests.capture.worlds import assert_same, interpret

MODEL = nn.Linear(2, 2)
OPT = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def loss_of(x):
    return MODEL(x).sum()


def globals_of_functions_called():
    def step(x):
        loss = loss_of(x)
        loss.backward()
        OPT.step()
        OPT.zero_grad()
        return loss

    return step


def nested_functions():
    def step(x):
        def inner():
            return MODEL(x)

        return inner()

    return step


def closure_containers_and_defaults():
    models = {"a": nn.Linear(2, 2), "b": [nn.Linear(2, 2), torch.ones(2)]}
    other = nn.Linear(2, 2)

    def step(x, model=other):
        return models["a"](models["b"][0](model(x))) + models["b"][1]

    return step


class Helper:
    __slots__ = ("model",)
    shift = torch.ones(1)

    def __init__(self):
        self.model = nn.Linear(2, 2)

    def __call__(self, x):
        return self.model(x) + self.shift


class HelpedTrainer:
    def __init__(self):
        self.helper = Helper()
        self._gain = torch.ones(1)

    @property
    def gain(self):
        return self._gain

    def train(self, x, scale):
        return self.compute(x) * scale * self.gain

    def compute(self, x):
        return self.helper(x)


def partials_methods_properties_and_slots():
    return functools.partial(HelpedTrainer().train, scale=torch.ones(1))


class HidingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(2, 2)]
        self.scale = torch.ones(2)

    def forward(self, x):
        return self.hidden[0](x) * self.scale


def plain_attributes_of_modules():
    net = HidingNet()
    return lambda x: net(x)


@pytest.mark.parametrize(
    "make",
    [
        globals_of_functions_called,
        nested_functions,
        closure_containers_and_defaults,
        partials_methods_properties_and_slots,
        plain_attributes_of_modules,
    ],
)
def test_what_a_step_reaches_is_found_before_it_is_traced(make, monkeypatch):
    """What is not is found by the trace, which then begins again."""
    made, trace = [], retracing.trace_step
    monkeypatch.setattr(retracing, "trace_step", lambda request: (made.append(1), trace(request))[1])
    step = Step(make(), build=interpret, strict=True)
    for _ in range(3):
        step(torch.ones(1, 2))
    assert len(made) == 1


def test_data_sets_are_not_searched():
    data = [torch.ones(1)] * 5000
    assert discover([("step", lambda: data[0])]).tensors == []


def test_containers_whose_own_methods_raise():
    class Irreps(tuple):  # as e3nn's are
        def __len__(self):
            raise NotImplementedError

        def __iter__(self):
            raise NotImplementedError

        def __contains__(self, _item):
            raise NotImplementedError

    def trained(wrap):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        model.irreps = Irreps((2, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @wrap
        def step(x):
            loss = (model(x) * model.irreps[1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [step(torch.ones(n, 2)) for n in (3, 3, 4)], step

    losses, step = trained(lambda function: Step(function, build=interpret, strict=True))
    assert_same(losses, trained(lambda function: function)[0])
    assert step.graphs


def test_the_gradient_of_a_tensor_that_the_search_misses_stays():
    def train(wrap):
        data = [None] * 2000
        weight = data[500] = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), 7.0)

        def step(x):
            before, data[500].grad = data[500].grad, None
            (x * data[500]).sum().backward()
            return data[500].grad + before

        step = wrap(step)
        return [(step(torch.full((2,), float(number))), weight.grad.clone()) for number in range(3)]

    assert_same(train(lambda step: Step(step, build=interpret, strict=True)), train(lambda step: step))


def test_what_discovery_misses_is_found_while_tracing():
    def make():
        content = {}

        class Box:
            def __getattr__(self, name):
                return content[name]

            def __setattr__(self, name, value):
                content[name] = value

        torch.manual_seed(0)
        box = Box()
        box.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        box.opt = torch.optim.SGD(box.model.parameters(), lr=0.1, momentum=0.9)
        box.scale = torch.full((1,), 2.0)

        def step(x):
            loss = (box.model(x) * box.scale).mean()
            loss.backward()
            box.opt.step()
            box.opt.zero_grad()
            return loss

        return box, step

    ours, our_step = make()
    theirs, their_step = make()
    captured = Step(our_step, build=interpret, strict=True)
    for number in range(4):
        x = torch.full((3, 2), float(number))
        torch.manual_seed(number)
        left = captured(x)
        torch.manual_seed(number)
        assert_same(left, their_step(x))
        for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            assert_same(one, other)
    ours.scale.fill_(3.0)
    theirs.scale.fill_(3.0)
    torch.manual_seed(9)
    left = captured(x)
    torch.manual_seed(9)
    assert_same(left, their_step(x))
    assert len(captured.graphs) == 1


def test_torch_compiled_modules_are_traced_through():
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = F.relu(model(x)).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    captured = Step(step, build=interpret, strict=True)
    for _ in range(3):
        captured(torch.ones(1, 2))
    assert captured.graphs[0].num_runs == 2


def test_a_step_within_a_step():
    model = nn.Linear(2, 2)
    inner = Step(lambda x: model(x), build=interpret, strict=True)
    outer = Step(lambda x: inner(x) * 2, build=interpret, strict=True)
    x = torch.ones(1, 2)
    assert_same(outer(x), model(x).detach() * 2)
    assert len(outer.graphs) == 1
    assert inner.graphs == []


class Wrapper(torch.optim.Optimizer):
    """An optimizer that only passes on, with properties in the place of attributes, as libraries have them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_an_optimizer_in_another():
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    wrapper = Wrapper(optimizer)

    def step(x):
        loss = (x * weight).sum()
        loss.backward()
        wrapper.step()
        wrapper.zero_grad()
        return loss

    found = discover([("step", step)])
    assert [(name, each) for name, each in found.optimizers] == [("wrapper.optimizer", optimizer)]
    captured = Step(step, build=interpret, strict=True)
    assert [captured(torch.ones(2)).item() for _ in range(3)] == [2.0, 0.0, -3.0]
    wrapper.param_groups[0]["lr"] = 0.0
    assert [captured(torch.ones(2)).item() for _ in range(2)] == [-6.5, -6.5]
