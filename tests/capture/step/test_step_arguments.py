"""What steps are called with: one tensor twice, numbers that change, and types that tracing has of its own."""

import cmath
import functools
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import World, assert_same, interpret


def run(make_step, calls, *, graphs):
    """Call the same step eagerly and captured, from the same seed, and compare after each call."""
    results, states = [], []
    for wrap in (lambda step: step, lambda step: Step(step, build=interpret, strict=True)):
        torch.manual_seed(0)
        world = make_step()
        step = wrap(world.step)
        mine = []
        for number, call in enumerate(calls):
            torch.manual_seed(number)
            mine.append((step(*call()), world.state()))
        results.append(mine)
        states.append(step)
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)
    assert len(states[1].graphs) == graphs
    return states[1]


def trained(loss_of):
    def make():
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(*args):
            loss = loss_of(model, *args)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

        model(torch.zeros(1, dtype=torch.long)).sum().backward()  # its gradients are there from the first call on
        model.zero_grad(set_to_none=False)
        return World(step, [model], [optimizer])

    return make


def tokens(seed=0):
    return torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(seed))


def language_model_loss(model, ids, labels):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_one_tensor_as_two_arguments():
    def twice(seed):
        ids = tokens(seed)
        return lambda: (ids, ids)

    run(trained(language_model_loss), [twice(0), twice(1), twice(2)], graphs=1)


def test_whether_two_arguments_are_one_tensor_is_part_of_the_call():
    def loss_of(model, ids, labels):
        return language_model_loss(model, ids, labels) * (2 if ids is labels else 1)

    ids = tokens()
    same, other = (lambda: (ids, ids)), (lambda: (ids, tokens(1)))
    run(trained(loss_of), [same, other, same, other, same], graphs=2)


def test_one_tensor_in_several_containers():
    def loss_of(model, batch):
        return language_model_loss(model, batch["ids"], batch["more"][1]) + batch["more"][0].float().mean()

    ids = tokens()
    run(trained(loss_of), [lambda: ({"ids": ids, "more": [tokens(1), ids]},)] * 3, graphs=1)


def test_one_tensor_as_two_arguments_of_which_one_is_written():
    def loss_of(model, ids, labels):
        ids.add_(1).remainder_(10)
        return language_model_loss(model, ids, labels)

    def twice():
        ids = tokens()
        return ids, ids

    run(trained(loss_of), [twice] * 3, graphs=1)


def test_two_views_of_one_memory_are_told_apart_from_one_tensor():
    def loss_of(model, ids, labels):
        return language_model_loss(model, ids, labels)

    def views():
        ids = tokens()
        return ids[:], ids[:]

    run(trained(loss_of), [views] * 3, graphs=1)


class Caches:
    """Several ways to keep something by the type of a tensor."""

    def __init__(self):
        self.by_type = {}
        self.nested = {"scale": {}}
        self.weak = weakref.WeakKeyDictionary()
        self.dispatch = functools.singledispatch(lambda x: 1.0)

    def scale(self, x):
        kind = type(x)
        if kind not in self.by_type:
            self.by_type[kind] = 2.0
        self.nested["scale"].setdefault(kind, 3.0)
        self.weak.setdefault(kind, 5.0)
        return self.by_type[kind] * self.nested["scale"][kind] * self.weak[kind] * self.dispatch(x)


def test_what_is_kept_by_the_type_of_a_tensor_stands_in_no_way():
    made = []

    def make():
        caches = Caches()
        made.append(caches)
        return trained(lambda model, ids: model(ids).mean() * caches.scale(ids) * caches.scale(model[1].weight))()

    run(make, [lambda: (tokens(),)] * 4, graphs=1)
    for caches in made:
        for kinds in (caches.by_type, caches.nested["scale"]):
            assert all(kind in (torch.Tensor, nn.Parameter) for kind in kinds)


def test_a_tensor_that_is_kept_by_the_type_of_a_new_one_is_refused():
    kept = {}
    model = nn.Linear(4, 2)

    @functools.partial(Step, build=interpret)
    def step(x):
        loss = model(x).sum()
        kept[type(loss)] = loss.detach()
        loss.backward()
        return loss

    with pytest.warns(FallbackWarning):
        step(torch.ones(3, 4))
    assert [*kept] == [torch.Tensor]


ALIKE = [1, True, 1.0, 0.0, -0.0, (1,), (True,), frozenset([True]), 0j, complex(0, -0.0)]
"""Values that a function can tell apart, some of which are equal to Python."""

NANS = [math.nan, complex(math.nan, 1.0), np.float64("nan"), np.float16("nan")]

HELD = {
    "a key of an argument": lambda holder, value: {value: 1},
    "a value of an argument": lambda holder, value: [value],
    "a key of a global": lambda holder, value: holder.clear() or holder.update({value: 1}),
    "a value of a global": lambda holder, value: holder.update({"a": value}) or ["a"],
}


def told(value):
    """A number of its own for each of these."""
    if isinstance(value, tuple | frozenset):
        return 100 * len(type(value).__name__) + told(next(iter(value)))
    if isinstance(value, bool):
        return 10 + value
    if isinstance(value, complex):
        return 40 + math.copysign(1, value.imag)
    return 20 + math.copysign(3, value) + value if isinstance(value, float) else value


@pytest.mark.parametrize("held", HELD)
def test_equal_values_that_code_can_tell_apart_have_graphs_of_their_own(held):
    holder = {}

    def plain(x, given):
        (item,) = holder if given is None else given
        return x * told(holder["a"] if given == ["a"] else item)

    step, x = Step(plain, build=interpret, strict=True, max_graphs=20), torch.ones(2)
    for value in ALIKE * 2:
        given = HELD[held](holder, value)
        assert torch.equal(step(x, given), plain(x, given)), value
    assert len(step.graphs) <= len(ALIKE) + 1


@pytest.mark.parametrize("held", [each for each in HELD if each != "a key of a global"])
@pytest.mark.parametrize("nan", NANS, ids=lambda nan: type(nan).__name__)
def test_a_nan_is_captured_once(held, nan):
    holder = {}

    def plain(x, given):
        (item,) = holder if given is None else given
        item = holder["a"] if given == ["a"] else item
        return x * (3 if cmath.isnan(item) else 5) * item

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    for _ in range(4):
        given = HELD[held](holder, type(nan)(nan) + 0)  # another object in each call
        assert torch.equal(step(x, given).isnan(), plain(x, given).isnan())
    assert len(step.graphs) == 1


def test_a_nan_among_numbers_that_change_is_one_of_them():
    def plain(x, number):
        return x * number if number != number else x + number

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    for number in [1.0, math.nan, 2.0, math.inf - math.inf, 3.0, math.nan]:
        assert torch.equal(step(x, number), plain(x, number)) or math.isnan(number)
        assert step(x, number).isnan().all() == math.isnan(number)
    assert len(step.graphs) <= 3


def test_the_sign_of_a_zero_counts_where_numbers_are_inputs():
    def plain(x, number, other):
        return torch.copysign(x, torch.zeros(()) + number) * math.copysign(1, other)

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    for number, other in [(1.0, 2.0), (2.0, 3.0), (0.0, 0.0), (-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0), (0.0, 0.0)]:
        assert torch.equal(step(x, number, other), plain(x, number, other)), (number, other)
