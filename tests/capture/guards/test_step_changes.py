"""What a step reads changes in a way that leaves no trace where it was read: results are never stale."""

import copy
import enum
import operator
import threading
import time
import warnings
from collections import Counter, UserDict, defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from millstream import callback
from millstream.capture import Step
from millstream.capture.guards import native
from millstream.errors import FallbackWarning
from tests.capture.worlds import World, batches, check, interpret, plain


@pytest.fixture(autouse=True, params=["compiled", "python"])
def _way(request, monkeypatch):
    if request.param == "compiled":
        monkeypatch.setattr(native, "DEVICES", frozenset({"cpu"}))


class Mode(enum.Enum):
    PLAIN = 1
    TRIPLE = 3


class WithMode(nn.Linear):
    mode = Mode.PLAIN

    def __init__(self):
        super().__init__(4, 3)
        self.mode, self.key = Mode.PLAIN, b"a"

    def forward(self, x):
        return super().forward(x) * self.mode.value * len(self.key)


class WithGain(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        y = super().forward(x)
        return y * self.gain if hasattr(self, "gain") else y


class WithMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.more = nn.Linear(4, 3), nn.ModuleList()
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()})

    def forward(self, x):
        x = self.first(x)
        for part in (*self.named.values(), *self.more):
            x = part(x)
        return x


class Settings:
    """One whose ``scale`` others inherit."""

    scale = 1.0


class Derived(Settings):
    pass


class WithSettings(nn.Linear):
    def __init__(self, settings):
        super().__init__(4, 3)
        self.settings = settings

    def forward(self, x):
        return super().forward(x) * self.settings.scale


def set_scale(world):
    type(world.modules[0].settings).scale = 3.0


CHANGES = {
    "an enum": (WithMode, lambda world: setattr(world.modules[0], "mode", Mode.TRIPLE)),
    "bytes": (WithMode, lambda world: setattr(world.modules[0], "key", b"abc")),
    "an attribute that a module did not have": (WithGain, lambda world: setattr(world.modules[0], "gain", 3.0)),
    "a parameter that it did not have": (
        WithGain, lambda world: setattr(world.modules[0], "gain", nn.Parameter(torch.ones(3)))
    ),
    "a module in an empty container": (WithMore, lambda world: world.modules[0].more.append(nn.Tanh())),
    "the order of modules": (
        WithMore, lambda world: world.modules[0].named.update({"a": world.modules[0].named.pop("a")})
    ),
    "an attribute that a class inherited": (lambda: WithSettings(type("Own", (Derived,), {})()), set_scale),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_noticed(change):
    make, alter = CHANGES[change]

    def world():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return World(plain(model, optimizer), [model], [optimizer])

    def between(world, number):
        if number == 4:
            alter(world)

    check(world, batches(8, 6, 4), between=between, graphs=None, rtol=1e-4, atol=1e-5)


def make_step(model, note):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
        return loss

    return Step(step, build=interpret)


@pytest.mark.parametrize("size", [3, 3000])
def test_an_array_that_is_counted_in_goes_on_counting(size):
    counts = np.zeros(size)

    def note(loss):
        counts[0] += 1

    step = make_step(nn.Linear(4, 3), note)
    with pytest.warns(UserWarning, match="changes"):
        for _ in range(5):
            step(torch.randn(6, 4))
    assert counts.tolist() == [5] + [0] * (size - 1)


@pytest.mark.parametrize("kind", [list, lambda: deque(maxlen=1005)])
def test_a_long_history_stays_one_of_tensors(kind):
    """It is longer than what is followed by the time that another form of the batch is met."""
    history, losses = kind(), []
    step = make_step(nn.Linear(4, 3), lambda loss: history.append((loss.detach(),)))
    with pytest.warns(UserWarning, match="changes"):
        losses += [step(torch.randn(size, 4)).detach() for size in [6] * 1010 + [2] * 4]
    assert len(history) == min(len(losses), getattr(history, "maxlen", None) or len(losses))
    assert {type(each) for (each,) in history} == {torch.Tensor}
    assert torch.equal(torch.stack([each for (each,) in history]), torch.stack(losses[-len(history) :]))


LONG = {
    "a number that is known later": ([0.0] * 2000, lambda history, loss: history.append(loss.item())),
    "a plain number": ([0.0] * 2000, lambda history, loss: history.append(3.0)),
    "a count in a list": ([0.0] * 2000, lambda history, loss: history.__setitem__(7, history[7] + 1)),
    "a count in a dict": (dict.fromkeys(range(2000), 0.0), lambda counts, loss: counts.update({7: counts[7] + 1})),
    "an item of a set": (set(range(2000)), lambda items, loss: items.add(-len(items))),
}


@pytest.mark.parametrize("what", LONG)
def test_a_long_container_is_changed_in_every_call(what):
    container, change = copy.copy(LONG[what][0]), LONG[what][1]
    step = make_step(nn.Linear(4, 3), lambda loss: change(container, loss))
    expected, losses = copy.copy(container), []
    is_captured = what in ("a number that is known later", "a plain number", "a count in a dict")
    with nullcontext() if is_captured else pytest.warns(UserWarning, match="changes"):
        for _ in range(4):
            losses.append(step(torch.randn(6, 4)).detach())
            change(expected, losses[-1])
    assert container == expected
    assert bool(step.graphs) is is_captured


def test_what_a_callback_puts_into_a_long_list_does_not_matter():
    history = [0.0] * 2000
    step = make_step(nn.Linear(4, 3), lambda loss: callback(history.append, loss.item()))
    for _ in range(6):
        step(torch.randn(6, 4))
    assert len(history) == 2006
    assert len(step.graphs) == 1


def test_what_another_thread_puts_into_a_long_buffer_stays_there():
    buffer, stopped = deque(range(2000)), threading.Event()

    def fill():
        while not stopped.is_set():
            buffer.append(len(buffer))
            time.sleep(1e-4)

    step = make_step(nn.Linear(4, 3), lambda loss: len(buffer))
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # as another thread writes to what it reads
            for _ in range(6):
                step(torch.randn(6, 4))
    finally:
        stopped.set()
        thread.join()
    assert [*buffer] == [*range(len(buffer))]


def test_masked_arrays_are_looked_at():
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    step = make_step(nn.Linear(4, 3), lambda loss: masked.shape)
    for _ in range(4):
        step(torch.randn(6, 4))
    assert len(step.graphs) == 1


class Holder:
    pass


def by_computed_names():
    """What a step changes in objects that it comes to by computed names alone, by kind."""
    path = {"part": "inner", "deep": "deeper", "items": "items", "table": "table", "kind": "kind"}
    world = Holder()
    world.inner, world.items, world.table, world.kind = Holder(), [0], {"n": 0}, type("Kind", (), {"n": 0})
    world.inner.n, world.inner.text, world.inner.deeper = 0, "", Holder()
    world.inner.deeper.n = 0

    def add(part):
        part.n += 1

    ways = {
        "getattr": lambda: add(getattr(world, path["part"])),
        "getattr of that": lambda: add(getattr(getattr(world, path["part"]), path["deep"])),
        "attrgetter": lambda: add(operator.attrgetter(path["part"])(world)),
        "__dict__": lambda: add(world.__dict__[path["part"]]),
        "vars": lambda: [add(part) for part in vars(world).values() if isinstance(part, Holder)],
        "setattr": lambda: setattr(getattr(world, path["part"]), "n", getattr(world, path["part"]).n + 2),
        "text": lambda: setattr(getattr(world, path["part"]), "text", "seen"),
        "list": lambda: count_first(getattr(world, path["items"])),
        "dict": lambda: getattr(world, path["table"]).update(n=getattr(world, path["table"])["n"] + 1),
        "class": lambda: add(getattr(world, path["kind"])),
    }

    def look():
        inner = world.inner
        return inner.n, inner.text, inner.deeper.n, [*world.items], {**world.table}, world.kind.n

    return ways, look


def count_first(items):
    items[0] += 1


@pytest.mark.parametrize("way", by_computed_names()[0])
def test_what_is_changed_by_computed_names_is_changed_in_each_call(way):
    (ours, look), (theirs, expected) = by_computed_names(), by_computed_names()

    def step(x):
        ours[way]()
        return x * 2

    captured = Step(step, build=interpret, strict=True)
    for _ in range(4):
        captured(torch.ones(2))
        theirs[way]()
        assert look() == expected()
    assert len(captured.graphs) == 1


class Notes(dict):
    """A dict that has attributes, too."""


class Losses(list):
    """A list that has."""


HOLDERS = {
    "a dict's own": (Notes(), lambda holder, value: setattr(holder, "last", value), lambda holder: holder.last),
    "an item": (Notes(), lambda holder, value: holder.update(last=value), lambda holder: holder["last"]),
    "a list's own": (Losses(), lambda holder, value: setattr(holder, "last", value), lambda holder: holder.last),
    "a partial's": (partial(max), lambda holder, value: setattr(holder, "last", value), lambda holder: holder.last),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_appears_in_the_attributes_of_a_container_is_a_number(holder):
    kept, store, read = HOLDERS[holder]
    step = make_step(nn.Linear(4, 3), lambda loss: store(kept, loss.item()))
    for _ in range(4):
        loss = step(torch.randn(6, 4)).item()
        assert read(kept) == loss
    assert type(read(kept)) is float
    assert step.graphs


class Looked(dict):
    def __missing__(self, key):
        raise AssertionError(key)


@dataclass(frozen=True)
class Key:
    name: str


KEYS = (("a", 1), (("a",), Mode.PLAIN), Mode.TRIPLE, Key("a"), frozenset("a"), range(2), None, len, torch.float32, "a")
MADE = (dict, Looked, partial(defaultdict, float), Counter, UserDict)


@pytest.mark.parametrize("make", MADE, ids=[getattr(make, "__name__", "defaultdict") for make in MADE])
def test_a_dict_has_keys_of_any_kind(make):
    def run(wrap):
        table = make(dict.fromkeys(KEYS, 1.0))
        keys, made = list(KEYS), dict(zip(KEYS, copy.deepcopy(KEYS), strict=True))  # equal ones are other objects

        @wrap
        def step(x):
            table[made[KEYS[0]]] += 1.0
            table[keys[6]] += 1.0
            return sum(x * table[made[key]] for key in keys if key in table) + table.get(Mode.PLAIN, 0.0)

        results = [step(torch.ones(2)) for _ in range(3)]
        for number, key in enumerate(KEYS):
            table[key] = number + 2.0
            results.append(step(torch.ones(2)))
        for key in (Mode.TRIPLE, "a"):
            del table[key]
            results.append(step(torch.ones(2)))
        return results, dict(table)

    (ours, held), (theirs, expected) = run(partial(Step, build=interpret, strict=True)), run(lambda step: step)
    assert all(map(torch.equal, ours, theirs))
    assert held == expected
