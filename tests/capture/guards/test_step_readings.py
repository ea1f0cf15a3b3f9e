"""Wherever a step finds a Python value, it notices another one; what it cannot do again it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import warnings
from collections import ChainMap, UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.capture.guards import native
from millstream.errors import FallbackWarning
from tests.capture.worlds import assert_same, interpret


@pytest.fixture(autouse=True, params=["compiled", "python"])
def _way(request, monkeypatch):
    """Both ways to check notice the same: the compiled one, which steps on a device use, and the one in Python."""
    if request.param == "compiled":
        monkeypatch.setattr(native, "DEVICES", frozenset({"cpu"}))


def of_attribute(holder):
    return lambda x: x * holder.scale, lambda value: setattr(holder, "scale", value)


def of_class():
    class Settings:
        scale = 1.0

    return of_attribute(Settings)


def of_object_whose_class_has_it():
    class Settings:
        scale = 1.0

    return of_attribute(Settings())


def of_slots():
    @dataclasses.dataclass(slots=True)
    class Settings:
        scale: float = 1.0

    return of_attribute(Settings())


def of_module_whose_class_has_it():
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    module = Scaled()
    return lambda x: module(x), lambda value: setattr(module, "scale", value)


def of_function():
    def step(x):
        return x * step.scale

    step.scale = 1.0
    return step, lambda value: setattr(step, "scale", value)


def of_new_key():
    settings = {}
    return lambda x: x * settings.get("scale", 1.0), lambda value: settings.update({"scale": value})


def of_list_that_grows():
    factors = [1.0]

    def step(x):
        for factor in factors:
            x = x * factor
        return x

    return step, factors.append


def of_list_in_module():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = []

        def forward(self, x):
            for factor in self.factors:
                x = x * factor
            return x

    module = Stack()
    return lambda x: module(x), module.factors.append


def of_set():
    options = {1.0}
    return lambda x: x * max(options), lambda value: (options.clear(), options.add(value))


def of_deque():
    recent = deque([1.0], maxlen=1)
    return lambda x: x * recent[-1], recent.append


def of_forward_set_later():
    module = nn.Linear(2, 2)
    return lambda x: module(x), lambda value: setattr(module, "forward", lambda x: x * value)


def of_method_set_later():
    class Scaled(nn.Module):
        def forward(self, x):
            return x

    module = Scaled()
    return lambda x: module(x), lambda value: setattr(Scaled, "forward", lambda self, x: x * value)


def of_buffer():
    module = nn.BatchNorm1d(2, affine=False).eval()
    return lambda x: module(x), lambda value: setattr(module.running_mean, "data", torch.full((2,), value))


def of_tensor():
    scale = torch.ones(2)
    return lambda x: x * scale, lambda value: setattr(scale, "data", torch.full((2,), value))


def of_layout():
    weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    return lambda x: x @ weight, lambda value: setattr(weight, "data", weight.data.t())


def of_shape():
    weight = nn.Parameter(torch.arange(4.0).view(4, 1))
    return lambda x: x[0] * weight, lambda value: setattr(weight, "data", weight.data[: 4 - int(value)])


def of_name_in_a_string():
    settings = types.SimpleNamespace(scale=1.0)
    return lambda x: x * getattr(settings, "scale", 3.0), lambda value: setattr(settings, "scale", value)


def of_dict_of_an_object():
    settings = types.SimpleNamespace(scale=1.0)
    return lambda x: x * vars(settings)["scale"], lambda value: setattr(settings, "scale", value)


def of_array():
    scales = np.array([1.0, 2.0])
    return lambda x: x * scales[0], lambda value: scales.__setitem__(0, value)


def of_user_dict():
    settings = UserDict(scale=1.0)
    return lambda x: x * settings["scale"], lambda value: settings.update(scale=value)


def of_chain():
    settings = ChainMap({}, {"scale": 1.0})
    return lambda x: x * settings["scale"], lambda value: settings.update(scale=value)


def of_import():
    settings = types.ModuleType("settings_of_a_test")
    settings.__file__, settings.SCALE = __file__, 1.0
    sys.modules["settings_of_a_test"] = settings

    def step(x):
        from settings_of_a_test import SCALE

        return x * SCALE

    return step, lambda value: setattr(settings, "SCALE", value)


def of_parameter():
    weight = nn.Parameter(torch.ones(2))
    weight.scale = 1.0
    return lambda x: x * weight * weight.scale, lambda value: setattr(weight, "scale", value)


READINGS = {
    "a name in a string": of_name_in_a_string,
    "the dict of an object": of_dict_of_an_object,
    "an array": of_array,
    "a user's dict": of_user_dict,
    "a chain of dicts": of_chain,
    "an import while it runs": of_import,
    "an attribute of a parameter": of_parameter,
    "a namespace of argparse": lambda: of_attribute(argparse.Namespace(scale=1.0)),
    "a simple namespace": lambda: of_attribute(types.SimpleNamespace(scale=1.0)),
    "a class": of_class,
    "an object whose class has it": of_object_whose_class_has_it,
    "a module whose class has it": of_module_whose_class_has_it,
    "slots": of_slots,
    "a function": of_function,
    "a new key": of_new_key,
    "a list that grows": of_list_that_grows,
    "a list in a module": of_list_in_module,
    "a set": of_set,
    "a deque": of_deque,
    "a forward of the object's own": of_forward_set_later,
    "another forward of the class": of_method_set_later,
    "data of a buffer": of_buffer,
    "data of a tensor": of_tensor,
    "data in another layout": of_layout,
    "data of another shape": of_shape,
}


@pytest.mark.parametrize("name", READINGS)
def test_another_value_is_noticed(name):
    step, change = READINGS[name]()
    captured = Step(step, build=interpret, strict=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for value in (None, None, 2.0, None, 3.0):
        if value is not None:
            change(value)
        assert_same(captured(x), step(x))
    assert len(captured.graphs) <= 3


def test_data_of_optimizer_state():
    results = []
    for wrap in (lambda step: step, lambda step: Step(step, build=interpret, strict=True)):
        weight = nn.Parameter(torch.ones(2))
        opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(x, weight=weight, opt=opt):
            (weight * x).sum().backward()
            opt.step()
            opt.zero_grad()

        run = wrap(step)
        for _ in range(3):
            run(torch.ones(2))
        opt.state[weight]["momentum_buffer"].data = torch.zeros(2)
        run(torch.ones(2))
        results.append((weight.detach(), opt.state[weight]["momentum_buffer"]))
    assert_same(*results)


def test_what_a_step_does_not_look_into_may_grow():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.losses = []

        def forward(self, x):
            return x * 2

        def fit(self, step, x):
            self.losses.append(step(x))

    net = Net()
    captured = Step(lambda x: net(x), build=interpret, strict=True)
    for _ in range(5):
        net.fit(captured, torch.ones(2))
    assert captured.graphs[0].num_runs == 5


def in_attribute():
    class Trainer:
        state = None

        def step(self, x):
            self.state = x * 1 if self.state is None else self.state + x
            return self.state * 1

    return Trainer().step


def in_absent_attribute():
    class Trainer:
        def step(self, x):
            if not hasattr(self, "state"):
                self.state = torch.zeros(2)
            self.state = self.state + x
            return self.state * 1

    return Trainer().step


def in_slot():
    @dataclasses.dataclass(slots=True)
    class Trainer:
        state: object = None

        def step(self, x):
            self.state = x * 1 if self.state is None else self.state + x
            return self.state * 1

    return Trainer().step


def in_cell():
    state = None

    def step(x):
        nonlocal state
        state = x * 1 if state is None else state + x
        return state * 1

    return step


def in_dict():
    states = {}

    def step(x):
        states["x"] = states["x"] + x if "x" in states else x * 1
        return states["x"] * 1

    return step


def in_class():
    class Trainer:
        table = None

        def step(self, x):
            if Trainer.table is None:
                Trainer.table = torch.arange(2.0)
            return x + Trainer.table

    return Trainer().step


@pytest.mark.parametrize("make", [in_attribute, in_absent_attribute, in_slot, in_cell, in_dict, in_class])
def test_what_the_first_call_makes_the_next_ones_use(make):
    theirs, captured = make(), Step(make(), build=interpret, strict=True)
    for number in range(5):
        x = torch.full((2,), float(number))
        assert_same(captured(x), theirs(x))
    assert len(captured.graphs) == 2


def test_state_that_changes_its_shape():
    def make():
        state = torch.zeros(6)

        def step(x):
            nonlocal state
            state = torch.tanh(x + state[: len(x)])
            return state.sum()

        return step

    theirs, captured = make(), Step(make(), build=interpret, strict=True)
    for count in (6, 6, 5, 5, 5, 4, 4, 4):
        assert_same(captured(torch.ones(count)), theirs(torch.ones(count)))
    with pytest.warns(FallbackWarning, match="pad_to"):  # the third length that is another
        for count in (3, 3, 3):
            assert_same(captured(torch.ones(count)), theirs(torch.ones(count)))


def count_in_class():
    class Counter:
        value = 0

        def step(self, x):
            Counter.value += 1
            return x * 2

    return Counter().step, lambda: Counter.value


def count_in_slot():
    @dataclasses.dataclass(slots=True)
    class Counter:
        value: int = 0

        def step(self, x):
            self.value += 1
            return x * 2

    counter = Counter()
    return counter.step, lambda: counter.value


def count_in_function():
    def step(x):
        step.value += 1
        return x * 2

    step.value = 0
    return step, lambda: step.value


@pytest.mark.parametrize("make", [count_in_class, count_in_slot, count_in_function])
def test_a_counter_counts_with_one_graph(make):
    step, count = make()
    captured = Step(step, build=interpret, strict=True)
    for number in range(1, 5):
        captured(torch.ones(2))
        assert (count(), type(count())) == (number, int)
    assert [graph.num_runs for graph in captured.graphs] == [4]


def test_the_reason_names_the_container():
    log = []

    def step(x):
        return x * 2 if not log else x * len(log)

    captured = Step(step, build=interpret, max_graphs=2)
    with pytest.warns(FallbackWarning, match="log holds other items than before"):
        for number in range(12):
            captured(torch.ones(2))
            log.append(number)


def test_a_counter_with_the_name_of_a_method_that_is_called():
    args, weight = argparse.Namespace(step=0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def function(x):
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return args  # is reached

    step = Step(function, build=interpret, strict=True)
    for _ in range(5):
        step(torch.ones(2))
        args.step += 1
    assert len(step.graphs) == 1


def test_tensors_in_a_tuple_are_the_same_by_identity_and_not_by_value():
    state = {"hidden": (torch.zeros(3), torch.zeros(()))}

    def function(x):
        first, second = state["hidden"]
        second.add_(1)
        return first + x, second + 0

    ours, x = Step(function, build=interpret), torch.ones(3)
    for number in range(4):
        before = state["hidden"] = (torch.full((3,), float(number)), torch.tensor(0.0))
        first, second = ours(x)
        assert (first[0].item(), second.item(), before[1].item()) == (number + 1, 1, 1)


@pytest.mark.parametrize("kind", ["list", "dict", "iterator"])
def test_what_a_module_also_has_under_a_name_that_no_code_knows(kind):
    held = {"list": [1.0, 2.0], "dict": {"a": 1.0}, "iterator": iter([1.0, 2.0, 3.0])}[kind]
    model = nn.Linear(2, 2)
    model.saved = held

    def function(x):
        y = model(x).sum()
        if kind == "iterator":
            return y * next(held)
        return y * sum(held) if kind == "list" else y * ("b" in held)

    x = torch.ones(1, 2)
    whole = model(x).sum().item()
    ours = Step(function, build=interpret)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        results = [ours(x).item() / whole for _ in range(2)]
        if kind != "iterator":
            held.append(3.0) if kind == "list" else held.update(b=1.0)
        results.append(ours(x).item() / whole)
    expected = {"list": [3, 3, 6], "dict": [0, 0, 1], "iterator": [1, 2, 3]}[kind]
    assert results == pytest.approx(expected)


def of_parameters_of_a_module():
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(2))
    return (
        lambda x: x * sum(each.sum() for name, each in module.named_parameters() if "scale" in name),
        lambda value: module.register_parameter("another_scale", nn.Parameter(torch.full((2,), value))),
    )


def of_names(change_of, read):
    """A module's parameters, of which the step reads everything but their values."""

    def make():
        module = nn.Module()
        module.scale, module.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        module.register_buffer("mask", torch.ones(2))
        return lambda x: x * read(module), lambda _: change_of(module)

    return make


def rename(module):
    del module.scale
    module.factor = nn.Parameter(torch.ones(2))


def rename_buffer(module):
    del module.mask
    module.register_buffer("other", torch.ones(2))


def put_last(module):
    scale = module.scale
    del module.scale
    module.scale = scale


def of_state_of_a_parameter():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x):
        weight.grad = x * 1
        optimizer.step()
        return weight.detach() * len(optimizer.state[weight])

    return step, lambda value: optimizer.state[weight].update(value=value)


class Scaled(torch.optim.Optimizer):
    """Keeps plain values and an object of each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(parameter, self.state[parameter])

    def change(self, parameter, state):
        if not state:
            state |= {"scale": 1.0, "factors": [1.0], "object": types.SimpleNamespace(v=1.0)}
        parameter.sub_(parameter.grad * state["scale"] * state["factors"][0] * state["object"].v)


def of_own_optimizer(change):
    def make():
        weight = nn.Parameter(torch.ones(2))
        optimizer = Scaled([weight])

        def step(x):
            weight.grad = x * 1
            optimizer.step()
            return weight.detach() * 1

        return step, lambda value: change(optimizer, optimizer.state[weight], value)

    return make


def of_method_of_a_module():
    class Model(nn.Module):
        def body(self, x):
            return x * 2

        def forward(self, x):
            return self.body(x)

    model = Model()
    return model, lambda value: setattr(model, "body", lambda x: x * value)


def of_dict_of_a_module():
    module = nn.Identity()
    return lambda x: x * module.__dict__.get("scale", 1.0), lambda value: setattr(module, "scale", value)


def of_object_in_a_group():
    class Schedule:
        factor = 1.0

        def __call__(self, rate):
            return rate * self.factor

    class Scheduled(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad * group["schedule"](group["lr"]))

    weight, schedule = nn.Parameter(torch.ones(2)), Schedule()
    optimizer = Scheduled([{"params": [weight], "schedule": schedule}], lr=0.1)

    def step(x):
        weight.grad = x * 1
        optimizer.step()
        return weight.detach() * 1

    return step, lambda value: setattr(schedule, "factor", value)


def of_optimizer():
    class Clipped(torch.optim.SGD):
        clip = 1.0

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad.clamp(max=self.clip))

    weight = nn.Parameter(torch.ones(2))
    optimizer = Clipped([weight], lr=1.0)
    optimizer.clip = 1.0

    def step(x):
        weight.grad = x * 100
        optimizer.step()
        return weight.detach() * 1

    return step, lambda value: setattr(optimizer, "clip", value)


def of_hook_of_an_optimizer():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    hooks = [optimizer.register_step_post_hook(lambda *_: None)]

    def step(x):
        weight.grad = x * 1
        optimizer.step()
        return weight.detach() * 1

    def change(value):
        hooks.pop().remove()
        hooks.append(optimizer.register_step_post_hook(lambda *_: torch._foreach_add_([weight.data], value)))

    return step, change


def of_pytorchs_own_module(make, name, value):
    module = make()
    return lambda x: module(torch.stack([x, x * 2, x * 4])), lambda _: setattr(module, name, value)


def of_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    return lambda x: x * scheduler.get_last_lr()[0], lambda _: scheduler.step()


OTHERS = {
    "how many parameters a module has": of_parameters_of_a_module,
    "names of parameters": of_names(rename, lambda module: sum(n[0] == "s" for n, _ in module.named_parameters())),
    "names of buffers": of_names(rename_buffer, lambda module: 1 + ("mask" in dict(module.named_buffers()))),
    "whether a parameter is there": of_names(
        lambda module: module.register_parameter("scale", None), lambda module: len([*module.parameters()])
    ),
    "the order of parameters": of_names(put_last, lambda module: next(module.parameters()).numel()),
    "parameters by the name of their dict": of_names(
        lambda module: module.register_parameter("scale", None),
        lambda module: sum(each is not None for each in module._parameters.values()),
    ),
    "what an optimizer keeps of a parameter": of_state_of_a_parameter,
    "a number that an optimizer keeps": of_own_optimizer(lambda _, state, value: state.update(scale=value)),
    "a list that an optimizer keeps": of_own_optimizer(lambda _, state, value: state["factors"].__setitem__(0, value)),
    "an object that an optimizer keeps": of_own_optimizer(lambda _, state, value: setattr(state["object"], "v", value)),
    "a method of an optimizer": of_own_optimizer(
        lambda optimizer, _, value: setattr(optimizer, "change", lambda each, _: each.sub_(each.grad * value))
    ),
    "a method of a module": of_method_of_a_module,
    "what is not in a module's __dict__": of_dict_of_a_module,
    "an object in an optimizer's group": of_object_in_a_group,
    "an attribute of an optimizer": of_optimizer,
    "a hook of an optimizer": of_hook_of_an_optimizer,
    "eps": lambda: of_pytorchs_own_module(lambda: nn.LayerNorm(2), "eps", 9.0),
    "dim": lambda: of_pytorchs_own_module(lambda: nn.Softmax(1), "dim", 0),
    "output_size": lambda: of_pytorchs_own_module(lambda: nn.AdaptiveAvgPool1d(1), "output_size", 2),
    "track_running_stats": lambda: of_pytorchs_own_module(lambda: nn.BatchNorm1d(2), "track_running_stats", False),
    "a scheduler's rate": of_rate,
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_else_a_step_reads_is_noticed(what):
    (ours, change_ours), (theirs, change_theirs) = OTHERS[what](), OTHERS[what]()
    captured = Step(ours, build=interpret, strict=True)
    for number in range(6):
        if number == 3:
            change_ours(0.25)
            change_theirs(0.25)
        x = torch.tensor([1.0, number + 2.0])
        assert_same(captured(x), theirs(x))
