"""Batches that are objects: taken apart like a dict, and results that are objects put together again."""

import collections
import copy
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from millstream.capture import Step
from millstream.data import register
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import assert_same, interpret


class Own:
    """A batch of the user's own."""

    def __init__(self, x, y, scale=1.0, kind="mean"):
        self.x, self.y, self.scale, self.kind = x, y, scale, kind

    @property
    def centred(self):
        return self.x - self.x.mean()

    def reduced(self, values):
        return values.mean() if self.kind == "mean" else values.sum()


class Slotted:
    __slots__ = ("kind", "scale", "x", "y")

    def __init__(self, x, y, scale=1.0, kind="mean"):
        self.x, self.y, self.scale, self.kind = x, y, scale, kind

    centred = Own.centred
    reduced = Own.reduced


class Encoding(collections.UserDict):
    """As of tokenizers: keys are attributes, too."""

    def __init__(self, x, y, scale=1.0, kind="mean"):
        super().__init__(x=x, y=y, scale=scale, kind=kind)
        self.n_sequences = None

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)

    centred = Own.centred
    reduced = Own.reduced


class Store:
    """Of a graph: knows the graph it is of."""

    def __init__(self, owner, values):
        self.values, self._owner = values, weakref.ref(owner)

    def owner(self):
        return self._owner()


class Graph:
    """A graph whose attributes lie in a store."""

    def __init__(self, x, y, scale=1.0, kind="mean"):
        self.__dict__["store"] = Store(self, {"x": x, "y": y, "scale": scale, "kind": kind})

    def __getattr__(self, name):
        if name == "store":
            raise AttributeError(name)
        return self.store.values[name]

    @property
    def centred(self):
        return self.store.owner().x - self.x.mean()

    reduced = Own.reduced


def namespace(x, y, scale=1.0, kind="mean"):
    """Within another object, and a tensor under two names."""
    inner = types.SimpleNamespace(values=[x], again=x)
    return types.SimpleNamespace(inner=inner, y=y, scale=scale, kind=kind)


def loss_of(model, batch):
    if isinstance(batch, types.SimpleNamespace):
        if batch.inner.values[0] is not batch.inner.again:  # an assert would lead the search into pytest
            raise RuntimeError("one tensor has become two")
        error = (model(batch.inner.again) - batch.y).square() * batch.scale
        return error.mean() if batch.kind == "mean" else error.sum()
    return batch.reduced((model(batch.centred) - batch.y).square() * batch.scale)


def world():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


@pytest.mark.parametrize("kind", [Own, Slotted, Encoding, Graph, namespace])
def test_is_one_graph_whose_guard_has_plain_attributes(kind):
    (ours, function), (theirs, eager) = world(), world()
    step = Step(function, build=interpret, strict=True)

    def call(**attributes):
        x, y = torch.randn(4, 3), torch.randn(4, 1)
        assert_same(step(kind(x, y, **attributes)), eager(kind(x, y, **attributes)))
        assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()))

    for _ in range(4):
        call()
    assert len(step.graphs) == 1
    call(kind="sum")
    assert len(step.graphs) == 2
    for scale in (0.5, 0.25, 2.0):  # a number, which is read in each call once it has changed
        call(scale=scale)
    assert len(step.graphs) == 3
    call()
    call(kind="sum")
    assert len(step.graphs) == 3


def test_sets_of_names_are_compared_by_what_they_hold():
    def function(batch):
        return batch.x * (2 if "x" in batch.fields else 3) + len(batch.more)

    def make(fields):
        batch = Own(torch.randn(3), None)
        batch.fields, batch.more = {*fields}, frozenset(fields)
        return batch

    step = Step(function, build=interpret, strict=True)
    for fields in ("xy", "xy", "xy", "y", "y", "xy"):
        batch = make(fields)
        assert_same(step(batch), function(batch))
    assert len(step.graphs) == 3  # that of the very first object, and one for each set


def test_a_set_is_unchanged_whose_copy_has_another_order():
    def function(batch):
        return batch.x * (2 if 7 in batch.fields else 3)

    def make():
        batch = Own(torch.randn(3), None)
        batch.fields = set()
        for each in (7, 15):  # of which the one that is added first is gone through last
            batch.fields.add(each)
        return batch

    assert [*set([*make().fields])] != [*make().fields]  # noqa: C405
    step = Step(function, build=interpret, strict=True)
    for _ in range(4):
        batch = make()
        assert_same(step(batch), function(batch))
    assert len(step.graphs) == 2  # that of the very first object, and one for all others


def test_methods_of_the_class_are_guarded():
    class Batch:
        def __init__(self, x):
            self.x = x

        def value(self):
            return self.x.sum()

    step = Step(lambda batch: batch.value(), build=interpret, strict=True)
    for _ in range(3):
        assert step(Batch(torch.ones(3))) == 3
    Batch.value = lambda self: -self.x.sum()
    assert step(Batch(torch.ones(3))) == -3


@pytest.mark.parametrize("by", ["pytree", "ours"])
def test_registered_class_is_one_graph_from_the_first_call(by):
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    if by == "ours":
        register(Pair, lambda pair: ([pair.left, pair.right], lambda parts: Pair(*parts)))
    else:
        _pytree.register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda parts, _: Pair(*parts))
    step = Step(lambda pair: pair.left * pair.right, build=interpret, strict=True)
    for _ in range(2):
        left, right = torch.randn(2), torch.randn(2)
        assert_same(step(Pair(left, right)), left * right)
    assert len(step.graphs) == 1


def test_results_are_of_the_same_class():
    def function(x):
        return Own(x * 2, [Slotted(x + 1, {"z": x})]), Encoding(x, x.sum())

    def normal_of(x):
        return torch.distributions.Normal(x, x.exp(), validate_args=False)

    step = Step(function, build=interpret, strict=True)
    ours_of_normal = Step(normal_of, build=interpret, strict=True)
    for _ in range(3):
        x = torch.randn(3)
        (ours, encoding), (theirs, expected) = step(x), function(x)
        assert type(ours) is Own
        assert type(ours.y[0]) is Slotted
        assert_same([ours.x, ours.scale, ours.y[0].x, ours.y[0].y["z"]], [x * 2, 1.0, x + 1, x])
        assert_same(dict(encoding), dict(expected))
        assert_same(ours.centred, theirs.centred)
        normal = ours_of_normal(x)
        assert type(normal) is torch.distributions.Normal
        assert_same([normal.loc, normal.scale, normal.batch_shape], [x, x.exp(), x.shape])
    assert len(step.graphs) == 1


def test_object_that_the_step_returns_and_keeps_is_refused():
    kept = Own(torch.zeros(2), None)

    def function(x):
        kept.x = x * 2
        return kept

    with pytest.raises(CaptureError, match="Own with tensors inside"):
        Step(function, build=interpret, strict=True)(torch.ones(2))


def test_what_the_step_changes_is_changed_as_in_eager():
    def function(batch):
        batch.x = batch.x * 2
        batch.count += 1
        return batch.x.sum()

    def make(count):
        batch = Own(torch.full((2,), float(count)), None)
        batch.count = count
        return batch

    step = Step(function, build=interpret)
    with pytest.warns(FallbackWarning, match="changes a container or an object among its arguments"):
        for count in range(9):
            ours, theirs = make(count), make(count)
            assert_same(step(ours), function(theirs))
            assert_same(vars(ours), vars(theirs))
    held = len(step.history)
    step(make(20))
    assert len(step.history) == held


def test_the_same_objects_again_stay_those_objects():
    """Two sets of counts, which a step changes in turn."""

    def function(state, x):
        state.count += 1
        state.total = state.total + x
        return state.total * state.count

    def states():
        made = Own(torch.zeros(2), None), Own(torch.ones(2), None)
        for number, state in enumerate(made):
            state.count, state.total = number, torch.zeros(2)
        return made

    step = Step(function, build=interpret, strict=True)
    ours, theirs = states(), states()
    for number in range(12):
        x = torch.full((2,), float(number))
        assert_same(step(ours[number % 2], x), function(theirs[number % 2], x))
        assert_same(vars(ours[number % 2]), vars(theirs[number % 2]))
    num_captured = len(step.history)
    for number in range(4):
        step(ours[number % 2], torch.ones(2))
    assert len(step.history) == num_captured


def test_trainer_is_no_batch():
    class Trainer:
        def __init__(self):
            self.model, self.seen = nn.Linear(3, 1), torch.zeros(())

    def function(trainer, x):
        trainer.seen = trainer.seen + 1
        return trainer.model(x).sum() * trainer.seen

    step = Step(function, build=interpret, strict=True)
    first = Trainer()
    for ours in (first, copy.deepcopy(first)):
        theirs = copy.deepcopy(ours)
        for _ in range(3):
            assert_same(step(ours, torch.ones(2, 3)), function(theirs, torch.ones(2, 3)))
            assert_same(ours.seen, theirs.seen)


def test_one_object_in_two_places_is_one():
    class Batch:
        def __init__(self, x):
            self.x = x

    def function(first, second):
        return first.x * (2 if first is second else 3)

    step = Step(function, build=interpret)
    for number in range(8):
        first, second = Batch(torch.full((2,), float(number))), Batch(torch.full((2,), float(number)))
        for pair in ((first, second), (first, first)):
            assert torch.equal(step(*pair), function(*pair))


class Strategy:
    def optimizer_step(self, optimizer):
        return optimizer.step()


class Progress:
    def __init__(self):
        self.begun = self.done = 0

    def before(self):
        self.begun += 1

    def after(self):
        self.done += 1


class Wrapped:
    """An optimizer as trainers hand it out: it knows its owner weakly, and tells a loop of its steps."""

    def __init__(self, optimizer, strategy):
        self.optimizer, self.strategy = optimizer, weakref.proxy(strategy)
        self.before = self.after = lambda: None

    def step(self):
        self.before()
        self.strategy.optimizer_step(self.optimizer)
        self.after()


class Trainer:
    """Gives the wrapper its methods anew in each call, as trainers with manual optimization do."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.strategy, self.progress = nn.Linear(3, 1), Strategy(), Progress()
        self.wrapped = Wrapped(torch.optim.SGD(self.model.parameters(), 0.1), self.strategy)

    def train(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.wrapped.step()
        self.wrapped.optimizer.zero_grad()
        return loss

    def run(self, step):
        losses = []
        for rows in range(4):
            self.wrapped.before, self.wrapped.after = self.progress.before, self.progress.after
            losses.append(step(torch.full((2, 3), float(rows))).detach())
            self.wrapped.before = self.wrapped.after = print
        return losses, self.progress.begun, self.progress.done, [*self.model.parameters()]


def test_wrapped_optimizers_that_tell_a_loop_of_their_steps_are_one_graph():
    ours, theirs = Trainer(), Trainer()
    step = Step(ours.train, build=interpret, strict=True)
    torch.testing.assert_close(ours.run(step), theirs.run(theirs.train))
    assert (ours.progress.done, len(step.history)) == (4, 1)
