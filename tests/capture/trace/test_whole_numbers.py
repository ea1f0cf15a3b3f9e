"""Whole numbers of any size are exact wherever a step computes with them: equal to Python and eager PyTorch."""

import operator
import os
import random

import numpy as np
import pytest
import torch

from millstream.capture.step.step import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import compile_with_inductor, interpret

NUM_SEEDS = int(os.environ.get("MILLSTREAM_FUZZ", "300")) // 100

LARGE = [2**31 + 7, 2**53 - 1, 2**53 + 1, 2**60 + 3, 1_763_400_000_123_456_789, 2**63 - 1, -(2**63), -(2**53) - 1]
BEYOND = [2**63, 2**64 + 5, -(2**63) - 1, 2**200]
OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_),
    *(
        operator.xor,
        operator.truediv,
        divmod,
        pow,
        operator.lshift,
        operator.rshift,
        min,
        max,
        operator.lt,
        operator.eq,
    ),
]
OF_ONE = [operator.neg, abs, operator.invert, lambda n: round(n, -2), lambda n: n.bit_length()]


def expression(draw, depth=3):
    """A random function of two whole numbers, and how it is written."""
    if depth == 0 or draw.random() < 0.15:
        if draw.random() < 0.6:
            at = draw.randrange(2)
            return (lambda *numbers: numbers[at]), "nm"[at]
        constant = draw.choice([1, 2, 3, 7, 10, 2**20, 2**32, 2**53 + 1, 2654435761, -5])
        return (lambda *_: constant), str(constant)
    left, shown = expression(draw, depth - 1)
    if draw.random() < 0.2:
        function = draw.choice(OF_ONE)
        return (lambda *numbers: function(left(*numbers))), f"f({shown})"
    right, other = expression(draw, depth - 1)
    function = draw.choice(OPERATORS)

    def value(*numbers):
        one, two = left(*numbers), right(*numbers)
        if function in (pow, operator.lshift, operator.rshift):
            two = two % 5
        result = function(one, two)
        return result[1] if function is divmod else result

    return value, f"{function.__name__}({shown}, {other})"


CONTEXTS = [
    lambda x, w, v: x * v,
    lambda x, w, v: w + v,
    lambda x, w, v: w * v - v,
    lambda x, w, v: torch.full((2,), v),
    lambda x, w, v: torch.tensor([v, 1]),
    lambda x, w, v: w // v if v else w,
    lambda x, w, v: (w > v, v),
    lambda x, w, v: torch.add(w, w, alpha=v),
    lambda x, w, v: (f"{v}", x.double() / (v or 1)),
]


def outcome(function, *args):
    try:
        return function(*args)
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as error:
        return type(error)


def check_equal(ours, theirs, what):
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple), what
        for one, two in zip(ours, theirs, strict=True):
            check_equal(one, two, what)
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, what
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        assert type(ours) is type(theirs), what
        assert ours == theirs, (what, ours, theirs)


def step_of(value, context):
    def compute(x, w, n, m):
        return context(x, w, value(n, m))

    return compute


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_expressions_of_large_numbers_are_equal_to_eager(seed):
    draw = random.Random(seed)
    for _ in range(4):
        value, shown = expression(draw)
        compute = step_of(value, draw.choice(CONTEXTS))
        step = Step(compute, build=interpret, max_graphs=100)
        x, w = torch.tensor([1.5, -2.0]), torch.tensor([3, 2**40])
        for _ in range(8):
            pool = [draw.choice([*LARGE, *range(-3, 4)]), draw.getrandbits(draw.choice([8, 40, 62]))]
            n, m = draw.choice([*pool, draw.choice(BEYOND)]), draw.choice(pool)
            check_equal(outcome(step, x, w, n, m), outcome(compute, x, w, n, m), f"{shown} of {n}, {m}")


def test_numbers_that_change_take_two_graphs_whatever_their_size():
    class Held:
        count = 2**53

    held = Held()

    def compute(x, n):
        held.count += 1
        hashed = (n % 2**20) * 2654435761 % 2**32
        return x * (n % 3), x * (n // 2 % 5), x.long() + n, x * hashed, torch.full((2,), held.count), x * (n & 7) / 3

    step = Step(compute, build=compile_with_inductor, strict=True)
    for n in (1, 2, 3, 2**53 + 1, -(2**60) - 1, np.int64(2**62 + 1), 12):
        ours = step(torch.ones(2), n)
        held.count -= 1
        for one, two in zip(ours, compute(torch.ones(2), n), strict=True):
            check_equal(one, two, n)
    assert len(step.graphs) <= 3  # one of NumPy's numbers


def of_items(x, t, small):
    n, m = t.sum().item(), small.sum().item()
    sums = n + 2**60 + 1, n - 3, -n, abs(n), n // 7, n % 1000, n % -7, n & 255, n | 1, n ^ m, ~n, m * 3, m**2
    sums += round(n, -1), round(m, 1), round(m)
    floats = n / 3, n * 0.5, 2.5 // (m + 1.5), n % 2.5, m**-1.0
    tensors = *(t + each for each in sums), *(x * each for each in (*sums, *floats))
    return [*tensors, n, sums[0], divmod(n, 10), f"{n + 1}"]


def test_what_is_read_from_tensors_is_exact():
    step = Step(of_items, build=compile_with_inductor, strict=True)
    for n, m in [(5, 3), (2**53 + 1, -4), (-(2**61) - 1, 7), (2**62 + 11, 1)]:
        arguments = torch.ones(2), torch.tensor([n]), torch.tensor([m], dtype=torch.int32)
        for at, (one, two) in enumerate(zip(step(*arguments), of_items(*arguments), strict=True)):
            check_equal(one, two, (n, m, at))
    assert len(step.graphs) == 1


FAILING = {
    "product": (lambda n: n * n, 2**40),
    "sum": (lambda n: n + 2**62, 2**62),
    "division": (lambda n: 7 // n, 0),
    "remainder": (lambda n: 7 % n, 0),
    "power": (lambda n: 2**n, -1),
}


@pytest.mark.parametrize("name", FAILING)
def test_more_than_a_graph_can_compute_of_what_is_read_is_an_error(name):
    function, bad = FAILING[name]
    step = Step(lambda x, t: x * function(t.item()), build=interpret, strict=True)
    for good in (3, 5):
        assert torch.equal(step(torch.ones(2), torch.tensor(good)), torch.ones(2) * function(good))
    with pytest.raises(ArithmeticError):
        step(torch.ones(2), torch.tensor(bad))


def test_more_than_64_bits_of_what_is_read_is_left_to_python():
    step = Step(lambda x, t: x * (t.item() * 6364136223846793005 % 1000003), build=interpret)
    with pytest.warns(FallbackWarning, match="may take more than 64 bits"):
        for n in (2, 2**40):
            assert torch.equal(step(torch.ones(2), torch.tensor(n)), step.function(torch.ones(2), torch.tensor(n)))


def test_sizes_are_exact():
    def compute(x, w):
        n = x.shape[0]
        return w * (n * 2**54 + 1), w + (n + 2**60), w * (2**62 // n), f"{n * 2**70}"

    step = Step(compute, build=interpret, dynamic=True, strict=True)
    for size in (2, 3, 5, 8):
        arguments = torch.ones(size), torch.tensor([3])
        for one, two in zip(step(*arguments), compute(*arguments), strict=True):
            check_equal(one, two, size)
