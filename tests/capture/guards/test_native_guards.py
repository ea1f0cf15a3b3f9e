"""The compiled checks: content while nothing changes, and not a moment longer."""

from __future__ import annotations

import gc
import math
import shutil
import weakref

import pytest
import torch
from torch import nn

from millstream import _native
from millstream.capture import Step
from millstream.capture.guards import native
from millstream.capture.record.location import SlotAttributes
from millstream.capture.state import signature
from millstream.capture.state.discover import MISSING
from millstream.capture.step.step import QUICKEN_EVERY
from millstream.errors import CaptureError
from tests.capture.worlds import interpret, plain
from tests.clocks import HANG_S

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


class Base:
    """Another one than a class has had."""


def make_closure(content):
    def closure():
        return content

    return closure


class Scene:
    """One of everything that can be watched."""

    def __init__(self):
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.home = torch.zeros(4, 3)
        self.weight.grad = self.home
        self.holder = {"weight": self.weight, "rate": 0.5, "name": "a", "nothing": None, "flag": True, "nan": math.nan}
        self.items = [self.weight, self.frozen]
        self.order = {"a": 1, "b": 2}
        content = object()

        closure = make_closure(content)

        class Settings(type("Base", (), {})):
            rate = 0.5

        class Slotted:
            __slots__ = ("rate",)

        self.settings, self.slotted = Settings(), Slotted()
        self.function = closure
        self.slotted.rate = 0.5
        self.cell = closure.__closure__[0]
        entries = [(self.holder, key, value) for key, value in self.holder.items()]
        entries += [(self.items, 0, self.weight), (self.items, 1, self.frozen), (self.cell, None, content)]
        entries += [(vars(self), "later", MISSING), (vars(Settings), "later", MISSING), (vars(Settings), "rate", 0.5)]
        entries += [(SlotAttributes(self.slotted), "rate", 0.5)]
        self.guards = native.QuickGuards(
            entries,
            [self.holder, self.items],
            [(self.order, (*self.order,))],
            [
                (self.settings, 0, Settings),
                (Settings, 1, Settings.__mro__),
            ],
            [(closure, closure.__code__, None, None)],
            [self.weight, self.frozen],
            [self.home, None],
            [self.weight],
        )


@pytest.fixture
def scene():
    made = Scene()
    assert made.guards.hold() == 1
    return made


def test_content_while_values_change(scene):
    with torch.no_grad():
        scene.weight.mul_(2)
        scene.home.fill_(1)
    scene.holder |= {
        "rate": float("0.5"),
        "name": "".join(["a"]),
        "nan": float("-nan"),
    }  # equal, though not the same objects
    assert scene.guards.hold() == 1


def same_tensor_elsewhere(scene):
    scene.holder["weight"] = nn.Parameter(scene.weight.detach())


def new_memory(scene):
    scene.weight.data = scene.weight.data.clone()


def other_offset(scene):
    scene.frozen.data = torch.cat([scene.frozen.data, torch.zeros(1)])[1:]


def no_memory(scene):
    scene.weight.untyped_storage().resize_(0)


def swapped(scene):
    torch.utils.swap_tensors(scene.frozen, nn.Parameter(torch.randn(3), requires_grad=False))


def other_gradient(scene):
    scene.weight.grad = scene.home.clone()


def no_gradient(scene):
    scene.weight.grad = None


def new_gradient(scene):
    scene.frozen.grad = torch.zeros(3)


def out_of_cell(scene):
    scene.cell.cell_contents = 1


FAULTS = {
    "a tensor replaced by an equal one": same_tensor_elsewhere,
    "memory": new_memory,
    "offset": other_offset,
    "no memory": no_memory,
    "swapped": swapped,
    "transposed": lambda scene: setattr(scene.weight, "data", scene.weight.data.t()),
    "cut": lambda scene: setattr(scene.weight, "data", scene.weight.data[:2]),
    "frozen": lambda scene: scene.weight.requires_grad_(False),
    "unfrozen": lambda scene: scene.frozen.requires_grad_(True),
    "gradient replaced": other_gradient,
    "gradient gone": no_gradient,
    "gradient come": new_gradient,
    "number": lambda scene: scene.holder.update(rate=0.25),
    "number in the place of a NaN": lambda scene: scene.holder.update(nan=0.5),
    "NaN": lambda scene: scene.holder.update(rate=math.nan),
    "number of another type": lambda scene: scene.holder.update(flag=1),
    "text": lambda scene: scene.holder.update(name="b"),
    "none": lambda scene: scene.holder.update(nothing=0),
    "entry removed": lambda scene: scene.holder.pop("rate"),
    "entry added": lambda scene: scene.holder.update(more=1),
    "item replaced": lambda scene: scene.items.reverse(),
    "item removed": lambda scene: scene.items.pop(),
    "item added": lambda scene: scene.items.append(1),
    "cell": out_of_cell,
    "attribute come": lambda scene: setattr(scene, "later", None),
    "attribute of a class": lambda scene: setattr(type(scene.settings), "rate", 0.25),
    "attribute of a class come": lambda scene: setattr(type(scene.settings), "later", 1),
    "slot": lambda scene: setattr(scene.slotted, "rate", 0.25),
    "slot emptied": lambda scene: delattr(scene.slotted, "rate"),
    "order": lambda scene: scene.order.update(a=scene.order.pop("a")),
    "key renamed": lambda scene: scene.order.update(c=scene.order.pop("b")),
    "class": lambda scene: setattr(scene.settings, "__class__", type("Other", (), {})),
    "bases": lambda scene: setattr(type(scene.settings), "__bases__", (Base,)),
    "code": lambda scene: setattr(scene.function, "__code__", make_closure(1).__code__.replace(co_name="other")),
    "defaults": lambda scene: setattr(scene.function, "__defaults__", (1,)),
    "defaults by keyword": lambda scene: setattr(scene.function, "__kwdefaults__", {"a": 1}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_notices(scene, name):
    FAULTS[name](scene)
    assert scene.guards.hold() == 0


def test_a_change_that_is_taken_back_is_none(scene):
    scene.holder["rate"] = scene.holder.pop("rate")
    assert scene.guards.hold() == 1
    scene.holder["more"] = 1
    assert scene.guards.hold() == 0
    assert scene.guards.hold() == 0  # as long as it lasts, not only when it comes
    del scene.holder["more"]
    assert scene.guards.hold() == 1


def test_several_listen_to_one_dict(scene):
    other = Scene()
    other.guards = native.QuickGuards([(scene.holder, "rate", 0.5)], [scene.holder], [], [], [], [], [], [])
    assert other.guards.hold() == 1
    scene.holder["rate"] = 0.25
    assert scene.guards.hold() == other.guards.hold() == 0
    scene.holder["rate"] = 0.5
    assert scene.guards.hold() == other.guards.hold() == 1
    del other
    scene.holder["rate"] = 0.25
    assert scene.guards.hold() == 0


def test_versions_count_up(scene):
    version = scene.weight._version
    scene.guards.bump_versions()
    assert scene.weight._version == version + 1
    assert scene.frozen._version == 0


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match="beyond"):
        native.QuickGuards([((1, 2), 0, 1)], [], [], [], [], [], [], [])


def make_step(model, opt):
    return Step(plain(model, opt), build=interpret, strict=True)


@pytest.fixture
def _on_cpu(monkeypatch):
    monkeypatch.setattr(native, "DEVICES", frozenset({"cpu"}))


@pytest.mark.usefixtures("_on_cpu")
def test_a_step_in_its_steady_state_is_found_fine_by_compiled_code():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False))
    step = make_step(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for _ in range(3):
        step(x, y)
    (graph,) = step.graphs
    assert graph.guards.quick is not None
    assert graph.guards.quick.hold() == 1


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_compiled_checks_are_begun_before_the_first_trace_where_they_are_needed_at_once(monkeypatch, is_on_gpu):
    begun, devices = [], {"cpu"} if is_on_gpu else {"cuda"}
    monkeypatch.setattr(native, "DEVICES", devices)
    monkeypatch.setattr(_native, "is_ready", lambda name: begun.append(name) or True)
    model = nn.Linear(4, 3)
    step = make_step(model, torch.optim.AdamW(model.parameters(), lr=0.01))  # whose first call runs as it is
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    step(x, y)
    assert not step.graphs
    assert ("tensors" in begun) == is_on_gpu
    begun.clear()
    step(x, y)
    assert len(step.graphs) == 1
    assert ("tensors" in begun) == is_on_gpu


def test_a_step_on_the_host_is_checked_by_compiled_code_once_it_has_run_often():
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    step, eager = make_step(models[0], optimizers[0]), plain(models[1], optimizers[1])
    x, y = torch.randn(6, 4), torch.randint(3, (6,))

    def run(number):
        for _ in range(number):
            torch.testing.assert_close(step(x, y), eager(x, y).detach())

    run(QUICKEN_EVERY + 2)
    _native._loading("tensors").join(HANG_S)
    run(QUICKEN_EVERY)
    (graph,) = step.graphs
    assert graph.guards.quick.hold() == 1
    assert graph.specs is not None
    optimizers[0].param_groups[0]["lr"] = optimizers[1].param_groups[0]["lr"] = 0.1
    run(2)
    for model in models:
        model[0].weight.requires_grad_(False)
        model[2].bias.data = torch.ones(3)
    run(2)
    assert graph not in step.graphs


def test_what_compiled_code_cannot_check_is_offered_to_it_once(monkeypatch):
    offered = []

    def refuse(*args):
        offered.append(args)
        raise ValueError("beyond")

    monkeypatch.setattr("millstream.capture.guards.guards.QuickGuards", refuse)
    _native._loading("tensors").join(HANG_S)
    model = nn.Linear(4, 3)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for _ in range(4 * QUICKEN_EVERY):
        step(x, y)
    assert len(offered) == 1
    assert step.graphs[0].num_runs > 3 * QUICKEN_EVERY


@pytest.mark.usefixtures("_on_cpu")
def test_an_older_graph_notices_that_parameters_were_written():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    step(x, y)
    older = model(x).sum()
    step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()


@pytest.mark.usefixtures("_on_cpu")
def test_what_a_dropped_step_held_is_freed():
    model = nn.Linear(4, 3)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(2):
        step(torch.randn(6, 4), torch.randint(3, (6,)))
    assert step.graphs[0].guards.quick is not None
    model.owner = step  # a ring: only the collector can free it
    weights = weakref.ref(model.weight)
    del model, step
    gc.collect()
    assert weights() is None


def model_of(step):
    return dict(zip(step.function.__code__.co_freevars, step.function.__closure__, strict=True))["model"].cell_contents


@pytest.fixture
def usual(_on_cpu, monkeypatch):
    """A step, its arguments, and a list of the tensors that Python has looked at since."""
    model = nn.Linear(4, 3)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    arguments = torch.randn(6, 4), torch.randint(3, (6,))
    for _ in range(4):
        step(*arguments)
    looked_at = []
    spec_of = signature.spec_of
    monkeypatch.setattr(signature, "spec_of", lambda tensor: looked_at.append(tensor) or spec_of(tensor))
    return step, arguments, looked_at


def test_usual_arguments_are_looked_at_by_compiled_code(usual):
    step, (x, y), looked_at = usual
    step(torch.randn(6, 4), y)
    assert not looked_at
    step(x, y=y)
    assert looked_at
    looked_at.clear()
    step(x, y)
    assert looked_at  # it has to find its graph first
    looked_at.clear()
    step(x, y)
    assert not looked_at


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x[:3], y[:3]),
        lambda x, y: (x.t().contiguous().t(), y),
        lambda x, y: (nn.Parameter(x, requires_grad=False), y),
        lambda x, y: (x, y.to(torch.int64).clone().view(6, 1)[:, 0]),
    ],
    ids=["sizes", "strides", "class", "alike"],
)
def test_others_get_a_graph_of_their_own_or_the_right_one(usual, change):
    step, (x, y), _ = usual
    changed = change(x, y)
    expected = nn.functional.cross_entropy(model_of(step)(changed[0].detach()), changed[1]).item()
    assert step(*changed).item() == pytest.approx(expected, rel=1e-5)


def test_an_argument_that_wants_a_gradient_is_refused_as_ever(usual):
    step, (x, y), _ = usual
    with pytest.raises(CaptureError, match="one of its arguments"):
        step(x.clone().requires_grad_(), y)


def test_other_modes_are_noticed(usual):
    step, arguments, looked_at = usual
    with torch.autocast("cpu", torch.bfloat16):
        step(*arguments)
    assert looked_at
    assert len(step.graphs) == 2


def test_a_graph_that_does_not_fit_any_more_is_not_run(usual):
    step, arguments, looked_at = usual
    model = model_of(step)
    model.weight.data = torch.zeros_like(model.weight)
    loss = step(*arguments)
    assert looked_at
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(model.bias.expand(6, 3), arguments[1]).item(), 0.1)


@pytest.mark.usefixtures("_on_cpu")
def test_numbers_of_each_call_are_told_from_tensors_without_making_a_key(monkeypatch):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def function(x, scale, y, power):
        loss = (weight * x * scale + y * power).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = Step(function, build=interpret, strict=True)
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([3.0, 0.5])
    for number in range(4):
        step(x, 0.5 + number, y, 2 + number)
    calls = [(x, 0.25, y, 7), (y, -3.0, x, 8), (x, float("inf"), y, 9), (x, 0.0, y, -0), (x, -0.0, y, 1 << 40)]
    odd = [(x, 2, y, 3), (x, 0.5, x, 3), (x, 0.5, y, 3.0), (x, True, y, 3), (x[:1], 0.5, y, 3), (x, 1.5, y.double(), 3)]
    with monkeypatch.context() as patch:
        patch.setattr("millstream.capture.step.calls.tree_flatten", None)
        for call in calls:
            torch.testing.assert_close(step(*call), function(*call), rtol=0, atol=0, equal_nan=True)
    for call in [*odd, *calls]:
        torch.testing.assert_close(step(*call), function(*call), rtol=0, atol=0, equal_nan=True)
