"""Numbers that a graph reads: arithmetic is recorded, questions are remembered."""

from __future__ import annotations

import math

import pytest
import torch

from millstream._torch.tensors import FakeTensorMode
from millstream.capture.effects.expressions import Nth
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import GraphScalar
from millstream.capture.trace.patches.numbers import math_takes_scalars
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.capture.trace.twins import Twins
from millstream.capture.trace.watches.function_watch import FunctionWatch

VALUE = 0.75


LATER = 0.25
"""The number in a later call."""


def scalar(value, later=LATER):
    """A number, which the graph reads as it is in a later call."""
    questions = Questions(lambda of, device, dtype: torch.tensor(of([later]), dtype=dtype))
    return GraphScalar(value, Nth(0), questions, torch.device("cpu"))


@pytest.fixture
def number():
    return scalar(VALUE)


@pytest.fixture
def questions(number):
    return number.questions


@pytest.mark.parametrize(
    "formula",
    [
        lambda h: 1 - h,
        lambda h: -h * 2,
        lambda h: h / 4 + 1,
        lambda h: 4 / h,
        lambda h: h**2,
        lambda h: 2**h,
        lambda h: abs(h - 3),
        lambda h: h * h - h,
        lambda h: h % 0.5,
    ],
)
def test_arithmetic_is_done_for_the_value_and_for_later_ones(formula, number, questions):
    result = formula(number)
    assert isinstance(result, GraphScalar)
    assert result.value == formula(VALUE)
    assert result.in_graph().item() == formula(LATER)
    assert result.of([0.5]) == formula(0.5)
    assert questions.allow([0.5])


def test_a_tensor_of_numbers_is_made_where_the_graph_has_them(number, questions):
    with FunctionWatch(pytest.fail, Twins([], FakeTensorMode(), {}), set(), EffectRecorder(questions)):
        made = torch.tensor([number, 0.1], dtype=torch.float64)
        assert questions.allow([0.5])
        assert made.tolist() == [LATER, 0.1]
        assert torch.tensor([number, 0.1], device="meta").device.type == "meta"
    assert not questions.allow([0.5])  # it is another tensor then


def test_comparisons_are_answered_and_asked_again(number, questions):
    assert number != 0
    assert 1 - number < 0.5
    assert not number > 1
    assert bool(number)
    assert questions.allow([0.6])
    assert not questions.allow([0.4])  # 1 - 0.4 < 0.5 is false
    assert not questions.allow([0.0])
    assert not questions.allow([2.0])


@pytest.mark.parametrize("take", [float, math.sqrt, lambda h: f"{float(h):.2f}", lambda h: [0] * int(h)])
def test_whoever_takes_the_value_binds_the_graph_to_it(take, number, questions):
    take(number)
    assert questions.allow([VALUE])
    assert not questions.allow([0.5])


def lists():
    torch.manual_seed(0)
    return [[torch.randn(3) for _ in range(2)] for _ in range(3)]


FUNCTIONS = {
    "mul": lambda h, a, b, c: a[0] * h,
    "right mul": lambda h, a, b, c: h * a[0],
    "sub": lambda h, a, b, c: a[0] - h,
    "right sub": lambda h, a, b, c: h - a[0],
    "right div": lambda h, a, b, c: h / a[0],
    "right pow": lambda h, a, b, c: h ** a[0],
    "pow": lambda h, a, b, c: a[0].abs() ** h,
    "compare": lambda h, a, b, c: a[0] < h,
    "add alpha": lambda h, a, b, c: a[0].add_(b[0], alpha=-h),
    "sub alpha": lambda h, a, b, c: torch.sub(a[0], b[0], alpha=h),
    "addcmul": lambda h, a, b, c: a[0].addcmul_(b[0], c[0], value=1 - h),
    "addcdiv": lambda h, a, b, c: torch.addcdiv(a[0], b[0], c[0], value=h),
    "lerp": lambda h, a, b, c: a[0].lerp_(b[0], 1 - h),
    "lerp weight": lambda h, a, b, c: torch.lerp(a[0], b[0], weight=h),
    "clamp": lambda h, a, b, c: a[0].clamp(max=h),
    "fill": lambda h, a, b, c: a[0].fill_(h),
    "foreach mul": lambda h, a, b, c: torch._foreach_mul(a, h),
    "foreach mul list": lambda h, a, b, c: torch._foreach_mul(a, [h, 2 * h]),
    "foreach add": lambda h, a, b, c: torch._foreach_add(a, h),
    "foreach add alpha": lambda h, a, b, c: torch._foreach_add_(a, b, alpha=-h) or a,
    "foreach sub alpha": lambda h, a, b, c: torch._foreach_sub(a, b, alpha=h),
    "foreach lerp": lambda h, a, b, c: torch._foreach_lerp_(a, b, 1 - h) or a,
    "foreach addcmul": lambda h, a, b, c: torch._foreach_addcmul_(a, b, c, 1 - h) or a,
    "foreach addcmul list": lambda h, a, b, c: torch._foreach_addcmul(a, b, c, [h, 1.0]),
    "foreach addcdiv": lambda h, a, b, c: torch._foreach_addcdiv(a, b, c, value=-h),
    "foreach pow": lambda h, a, b, c: torch._foreach_pow(h, a),
    "foreach div": lambda h, a, b, c: torch._foreach_div_(a, h) or a,
    "foreach maximum": lambda h, a, b, c: torch._foreach_maximum(a, h),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_read_the_tensor(name, number, questions):
    function = FUNCTIONS[name]
    expected = function(LATER, *lists())
    watch = FunctionWatch(pytest.fail, Twins([], FakeTensorMode(), {}), set(), EffectRecorder(questions))
    with watch:
        result = function(number, *lists())
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert questions.allow([0.5])


def test_a_function_that_takes_numbers_only_binds_the_graph_to_the_value(number, questions):
    with FunctionWatch(pytest.fail, Twins([], FakeTensorMode(), {}), set(), EffectRecorder(questions)):
        result = torch.nn.functional.leaky_relu(torch.tensor([-1.0]), number)
    assert result.item() == -VALUE
    assert not questions.allow([0.5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_like_a_python_number_it_keeps_the_dtype(dtype, number, questions):
    with FunctionWatch(pytest.fail, Twins([], FakeTensorMode(), {}), set(), EffectRecorder(questions)):
        assert (torch.ones(2, dtype=dtype) * number).dtype == dtype
        assert (torch.ones(2, dtype=torch.int64) * number).dtype == torch.float32


def test_whole_numbers_stay_whole():
    number = scalar(3, later=2**60 + 1)
    questions = number.questions
    with FunctionWatch(pytest.fail, Twins([], FakeTensorMode(), {}), set(), EffectRecorder(questions)):
        assert (torch.tensor([2]) + number).tolist() == [2**60 + 3]
        assert (torch.tensor([2.0]) * number).dtype is torch.float32
        assert torch.full((2,), number).dtype is torch.int64
        assert (torch.tensor([2]) * (number % 7)).item() == 2 * ((2**60 + 1) % 7)
    assert questions.allow([2**60 + 1])
    assert not questions.allow([2.5])
    assert not questions.allow([2**63])
    assert list(range(number)) == [0, 1, 2]
    assert not questions.allow([4])
    assert type((number + 1).of([6])) is int


def test_what_fails_for_other_numbers_is_another_graph(number, questions):
    assert (1 / number).in_graph().item() == 1 / LATER
    assert questions.allow([2.0])
    assert not questions.allow([0.0])
    with pytest.raises(ZeroDivisionError):
        number / 0
    assert not questions.allow([2.0])  # the program may have expected the error


def test_functions_of_math_are_computed_by_the_host(number, questions):
    with math_takes_scalars():
        found = math.sqrt(1 - number), math.pow(number, 2), math.log(number, 2), math.floor(3 * number)
        parts = divmod(number, 1)
        assert math.sqrt(4) == 2
        assert math.isfinite(number)
    assert [each.value for each in (*found, *parts)] == [0.5, VALUE**2, math.log(VALUE, 2), 2, 0, VALUE]
    assert found[0].in_graph().item() == math.sqrt(1 - LATER)
    assert found[0].of([0.36]) == 0.8
    assert questions.allow([0.5])
    assert not questions.allow([math.inf])


def test_what_is_computed_again_is_the_same(number):
    assert (1 - number) is (1 - number)
    assert (number + number) is (number + number)
    assert (number - 1) is not (1 - number)
    assert (number * 2) is not (number * 2.5)
    assert (number * 0.0) is not (number * -0.0)


def test_what_is_asked_again_is_asked_once(number, questions):
    for _ in range(3):
        assert number > 0.5
        assert not number > 1
        assert float(number) == VALUE
    assert len(questions.steps) == 3
