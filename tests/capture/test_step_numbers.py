"""Numbers that change between calls, read from objects or given as arguments: equal to eager, by few captures."""

import functools

import pytest
import torch
from torch import nn

from millstream.capture.step.step import Step
from tests.capture.worlds import interpret

CALLS = 22


class Held:
    """Numbers as users keep them."""

    def __init__(self):
        self.number, self.count, self.table, self.row = 1.0, 0, {"weight": 1.0}, [1.0]
        self.net = nn.Identity()
        self.net.temperature = 1.0


class Kind:
    number = 1.0


NUMBER = 1.0


def set_global(_, value):
    globals()["NUMBER"] = value


ANNEALED = {
    "attribute": (lambda o, v: setattr(o, "number", v), lambda o, x: x * o.number),
    "module": (lambda o, v: setattr(o.net, "temperature", v + 1), lambda o, x: torch.softmax(x, 0) / o.net.temperature),
    "entry": (lambda o, v: o.table.update(weight=v), lambda o, x: torch.add(x, x, alpha=o.table["weight"])),
    "item": (lambda o, v: o.row.__setitem__(0, v), lambda o, x: torch.lerp(x, x * 2, o.row[0])),
    "class": (lambda _, v: setattr(Kind, "number", v), lambda _, x: x + Kind.number),
    "global": (set_global, lambda _, x: x**NUMBER),
    "nothing depends on it": (lambda o, v: setattr(o, "number", v), lambda _, x: x * 2),
    "text": (lambda o, v: setattr(o, "number", v), lambda o, x: (x, f"{o.number:.2f}")),
    "two": (
        lambda o, v: (setattr(o, "number", v), o.table.update(weight=-v)),
        lambda o, x: x * o.number + o.table["weight"],
    ),
}  # fmt: skip


def captures(change, use, values):
    """How many captures a step takes that is equal to eager for each value."""
    made, held = [], Held()
    step = Step(functools.partial(use, held), build=lambda *given: made.append(1) or interpret(*given), strict=True)
    for value in values:
        change(held, value)
        torch.testing.assert_close(_tensor_of(step(torch.ones(3))), _tensor_of(use(held, torch.ones(3))))
        assert _text_of(step(torch.ones(3))) == _text_of(use(held, torch.ones(3)))
    return len(made)


def _tensor_of(result):
    return result[0] if isinstance(result, tuple) else result


def _text_of(result):
    return result[1] if isinstance(result, tuple) else ""


@pytest.mark.parametrize("name", ANNEALED)
def test_number_that_changes_is_an_input_after_its_second_value(name):
    change, use = ANNEALED[name]
    assert captures(change, use, [0.25 * call for call in range(CALLS)]) <= 2


def test_number_that_is_compared_guards_the_outcome():
    def change(held, value):
        held.count = value

    assert captures(change, lambda o, x: x * (2 if o.count > 4 else 3), range(CALLS)) <= 3
    assert captures(change, lambda o, x: x * 2 if o.count % 5 == 0 else x, range(CALLS)) <= 3
    assert captures(change, lambda o, x: x * min(1.0, o.count / 10), range(CALLS)) <= 3


def test_number_without_which_nothing_can_be_captured_has_a_graph_for_each_value():
    @functools.lru_cache
    def cached(count):
        return 2.0**count

    def change(held, value):
        held.count = value

    table = {1: 2.0, 2: 4.0, 3: 8.0}
    for use in (lambda o, x: x * cached(o.count), lambda o, x: x * table[o.count], lambda o, x: x[: o.count]):
        assert captures(change, use, [1, 2, 3, 1, 2, 3]) == 3


def test_arguments_that_change_or_are_never_used_cost_two_captures():
    made = []
    step = Step(lambda x, weight, index: x * weight, build=lambda *a: made.append(1) or interpret(*a), strict=True)
    for index in range(CALLS):
        assert step(torch.ones(2), index / 4, index).tolist() == [index / 4] * 2
    assert len(made) <= 2
