"""Numbers that change between calls, read from objects or given as arguments: equal to eager, by few captures."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DisableTorchFunction  # by this name a trace does not see it
from torch.utils.checkpoint import checkpoint

from millstream.capture.step.step import Step
from millstream.errors import FallbackWarning
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


class Reversed(torch.autograd.Function):
    """A gradient-reversal layer: what its forward is given, its backward uses."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient * torch.tensor([ctx.factor, 1.0, 2]), None


def gradient(function, x):
    """Through ``backward`` as users write it, so that what it runs is called from within a call of PyTorch's."""
    x = x.clone().requires_grad_()
    function(x * 2).square().sum().backward()
    return x.grad


def hooked(x, factor):
    x.register_hook(lambda gradient: gradient * factor)
    return x.sin()


def fill(x, number):
    """The ways in which elements become a number."""
    y = x * 1
    y[:2] = number
    y[y > 2] = number
    rows = torch.full((2, 3), number), x.new_full((3,), number), torch.full_like(x, number, dtype=torch.float64)
    filled = x.masked_fill(x > number, number) + x.index_fill(0, torch.tensor([1]), value=number)
    return filled.double() + y + sum(row.double() for row in rows) + torch.as_tensor([number, 1.0, 2.0])


def set_number(held, value):
    held.number = value


ANNEALED = {
    "autograd.Function": (set_number, lambda o, x: gradient(lambda y: Reversed.apply(y, o.number), x)),
    "autograd.Function of a value": (
        set_number,
        lambda o, x: gradient(lambda y: Reversed.apply(y, (y.sum() * o.number).item()), x),
    ),
    "checkpoint": (
        set_number,
        lambda o, x: gradient(lambda y: checkpoint(lambda z: (z * o.number).sin(), y, use_reentrant=False), x),
    ),
    "hook": (set_number, lambda o, x: gradient(lambda y: hooked(y, o.number), x)),
    "tensor": (set_number, lambda o, x: x * torch.tensor(o.number) + torch.tensor([[o.number] * 3, [1, 2, 3]]).sum()),
    "distribution": (set_number, lambda o, x: torch.distributions.Normal(x, o.number + 1).log_prob(x + 1)),
    "fill": (set_number, lambda o, x: gradient(lambda y: y * fill(y, int(o.table["weight"]) + o.number), x)),
    "Gumbel": (set_number, lambda o, x: F.gumbel_softmax(x, tau=o.number + 1, dim=0).sum()),
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


@pytest.mark.parametrize("has_other", [False, True])
def test_numbers_of_one_object_that_change_one_after_the_other_cost_three_captures(has_other):
    """The others are expected to change, but for one that only a plain number serves."""
    held, table, made = Held(), {0.5: 3.0, 0.25: 5.0}, []
    held.row = [1.0] * 8

    def use(x):
        for weight in held.row[:-1]:
            x = x * weight + 1
        return x * table[held.row[-1]] if has_other else x

    held.row[-1] = 0.5
    step = Step(lambda x: use(x), build=lambda *given: made.append(1) or interpret(*given), strict=True)
    for place in (0, 1, 0, 1, 0) if has_other else range(7):
        torch.testing.assert_close(step(torch.ones(2)), use(torch.ones(2)))
        held.row[place] += 0.5
    torch.testing.assert_close(step(torch.ones(2)), use(torch.ones(2)))
    assert len(made) == 3
    held.row[-1] = 0.25
    torch.testing.assert_close(step(torch.ones(2)), use(torch.ones(2)))


TYPES = {
    "is": lambda n: type(n) is float,
    "is not": lambda n: float is not type(n),
    "equal": lambda n: type(n) == int,  # noqa: E721  as people write it
    "one of": lambda n: type(n) in (int, bool),
    "none of": lambda n: type(n) not in [float, complex],
}


@pytest.mark.parametrize("name", TYPES)
def test_what_type_a_number_has_is_answered_as_in_eager(name):
    held, asks = Held(), TYPES[name]

    def use(x, n):
        return x * (2 if asks(n) else 3) + (n if asks(held.number) else 1) + (4 if asks(x.shape[0]) else 5)

    step = Step(use, build=interpret, strict=True)
    for size, n, held.number in [(2, 1.5, 1.0), (3, 2.5, 2), (4, 3, 3.0), (5, 4, 4), (2, 1.5, 5.0), (3, 2.5, 2)]:
        assert step(torch.ones(size), n).tolist() == use(torch.ones(size), n).tolist()


@pytest.mark.parametrize("number_of", [lambda x, _: x.sum().item(), lambda _, group: group["lr"]], ids=["item", "rate"])
def test_the_type_of_what_is_no_plain_number_is_refused(number_of):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)

    def use(x):
        (x * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x * 2 if type(number_of(x, optimizer.param_groups[0])) is float else x * 3

    step = Step(use, build=interpret)
    with pytest.warns(FallbackWarning, match="compares the type"):
        assert [step(torch.ones(2)).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3


def test_a_step_that_asks_for_types_of_ever_more_numbers_says_so():
    step = Step(lambda x, n: x * (n if type(n) is float else 2), build=interpret, max_graphs=2)
    with pytest.warns(FallbackWarning, match=r"hardly served again\. .* compares the type .*isinstance"):
        for n in range(8):
            assert step(torch.ones(2), n / 2).tolist() == [n / 2] * 2


def test_arguments_that_change_or_are_never_used_cost_two_captures():
    made = []
    step = Step(lambda x, weight, index: x * weight, build=lambda *a: made.append(1) or interpret(*a), strict=True)
    for index in range(CALLS):
        assert step(torch.ones(2), index / 4, index).tolist() == [index / 4] * 2
    assert len(made) <= 2


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_numbers_of_numpy_change_like_pythons(kind):
    step = Step(lambda x, n: (x * n, n * 2, f"{n}"), build=interpret, strict=True)
    for call in range(6):
        n = kind(call + 0.5)
        scaled, doubled, text = step(torch.ones(3), n)
        assert torch.equal(scaled, torch.ones(3) * n)
        assert (type(doubled), doubled, text) == (type(n * 2), n * 2, f"{n}")
    assert len(step.graphs) == 2


def test_whole_numbers_are_never_rounded():
    def compute(x, n):
        hashed, large = n * 2654435761 % 2**32, (x * (2**60 + 1)).sum().item()
        return x * n, x * hashed, x * large, torch.tensor([n, 1]), torch.full((2,), n)

    step = Step(compute, build=interpret, strict=True)
    for n in (1, 2, 2**30 + 1, 2**31 + 7, 2**53 + 1, -(2**60) - 1, 3):
        torch.testing.assert_close(step(torch.arange(3), n), compute(torch.arange(3), n), rtol=0, atol=0)


def test_tensor_of_whole_numbers_that_change_is_whole():
    def take(x, n):
        return x[torch.tensor([n, 0])] + torch.tensor(n, dtype=torch.float64)

    step = Step(take, build=interpret, strict=True)
    for n in (1, 2, 1, 0):
        assert torch.equal(step(torch.arange(3.0), n), take(torch.arange(3.0), n))
    assert len(step.graphs) == 2


def test_number_where_pytorch_takes_none_falls_back_with_a_remedy_that_works():
    def add(x, n):
        with DisableTorchFunction():  # as in a library's code beneath its tensor subclass
            return torch.add(x, x, alpha=n)

    step = Step(add, build=interpret)
    step(torch.ones(3), 1.0)
    with pytest.warns(FallbackWarning, match=r"takes none\. At .* Give it int\(number\) or float\(number\)"):
        step(torch.ones(3), 2.0)
    followed = Step(lambda x, n: add(x, float(n)), build=interpret, strict=True)
    for n in (1.0, 2.0, 3.0):
        assert torch.equal(followed(torch.ones(3), n), add(torch.ones(3), n))
