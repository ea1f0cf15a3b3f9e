"""Objects are found wherever a function can reach them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from millstream.capture import Step
from millstream.capture.state.discover import discover
from tests.capture.worlds import assert_same, interpret

MODEL = nn.Linear(2, 2)
OPT = torch.optim.SGD(MODEL.parameters(), lr=0.1)
REGISTRY = {}


def names(found):
    return (
        [name for name, _ in found.modules],
        [name for name, _ in found.optimizers],
        [name for name, _ in found.tensors],
    )


def loss_of(x):
    return MODEL(x).sum()


def test_globals_also_of_functions_called():
    def step(x):
        loss_of(x).backward()
        OPT.step()

    assert names(discover([("step", step)])) == (["MODEL"], ["OPT"], [])


def test_nested_functions():
    def step(x):
        def inner():
            return MODEL(x)

        return inner()

    assert names(discover([("step", step)]))[0] == ["MODEL"]


def test_closure_containers_and_defaults():
    models = {"a": nn.Linear(2, 2), "b": [nn.Linear(2, 2), torch.ones(2)]}
    other = nn.Linear(2, 2)

    def step(x, model=other):
        return models["a"](models["b"][0](model(x)))

    assert names(discover([("step", step)])) == (
        ["models['a']", "models['b'][0]", "default[0]"],
        [],
        ["models['b'][1]"],
    )


def test_partial_and_bound_method_and_attributes_by_name():
    class Helper:
        def __init__(self):
            self.model = nn.Linear(2, 2)
            self.unrelated = nn.Linear(2, 2)

        def __call__(self, x):
            return self.model(x)

    class Trainer:
        def __init__(self):
            self.helper = Helper()
            self.data = [nn.Linear(2, 2)]

        def train(self, x, scale):
            return self.compute(x) * scale

        def compute(self, x):
            return self.helper(x)

    found = discover([("train", functools.partial(Trainer().train, scale=torch.ones(1)))])
    assert len(found.modules) == 1
    assert found.modules[0][0].endswith("helper.model")
    assert len(found.tensors) == 1


def test_property_and_cached_tensor():
    class Trainer:
        def __init__(self):
            self._scale = torch.ones(1)

        @property
        def scale(self):
            return self._scale

        def train(self, x):
            return x * self.scale

    found = discover([("train", Trainer().train)])
    assert [name for name, _ in found.tensors] == ["self._scale"]


def test_tensors_and_modules_in_plain_attributes_of_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]
            self.scale = torch.ones(2)

        def forward(self, x):
            return self.hidden[0](x) * self.scale

    net = Net()
    found = discover([("step", lambda x: net(x))])
    assert [name for name, _ in found.modules] == ["net", "net.hidden[0]"]
    assert [name for name, _ in found.tensors] == ["net.scale"]


def test_data_sets_are_not_searched():
    data = [torch.ones(1)] * 5000
    assert names(discover([("step", lambda: data[0])])) == ([], [], [])


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


def hide(key, value):
    REGISTRY[key] = value


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


def test_slots_and_attributes_of_classes():
    class Box:
        __slots__ = ("model",)
        scale = torch.ones(1)

        def __call__(self, x):
            return self.model(x) * self.scale

    box = Box()
    box.model = nn.Linear(2, 2)
    assert names(discover([("step", lambda x: box(x))])) == (["box.model"], [], ["box.scale"])


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
