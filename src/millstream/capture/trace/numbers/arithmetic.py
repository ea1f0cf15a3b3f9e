"""Arithmetic with scalars of a graph: written down for the host, and for the graph where the host does not know them.

**Contract**
- Of numbers that are known before a replay the host computes everything, in Python and in the program's order, but for
  sums and products of floats, which the graph computes alike; a failure there captures the step again, which fails as
  it would have eagerly.
- Of numbers that the graph brings (``HostScalar``) it computes what follows itself: whole ones in 64 bits, others in
  double precision. Where more than 64 bits may be needed, the host computes it after the replay and raises.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.expressions import Always, Apply, Expression
from millstream.capture.effects.late_values import Leaf
from millstream.capture.lines import may_be_caught
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import GraphScalar, is_scalar, is_tensor
from millstream.capture.trace.numbers.whole_numbers import INT64, USUAL, Bounds, is_double, is_within

BEYOND = -(2**64), 2**64
"""Bounds of what may take more than 64 bits, or fail."""


@dataclass(frozen=True, slots=True)
class NumberForm:
    """How the graph computes what a function gives for numbers that it has, and what kind of number that is."""

    is_whole: bool
    to_tensor: Callable[..., Tensor]  # of tensors and numbers
    bounds: Bounds = (BEYOND, INT64)  # of a whole number; any, unless that is known
    is_answer: bool = False  # whether that is a ``bool``


def compute(function: Callable[..., Any], *operands: Any, form: NumberForm | None = None) -> Any:
    """Return what a function of numbers gives, some of which are scalars.

    Args:
        function: Looks at nothing but its arguments.
        operands: Scalars and plain values.
        form: How the graph computes it of what it has itself; ``None`` for an operator's.
    """
    scalars = [*scalars_in(operands)]
    first = scalars[0]
    if first.is_asked_by_others:
        return function(*evaluate(operands, GraphScalar.outside))
    key = function, *map(_key_of, operands)
    return first.once(key, lambda: _computed(function, operands, scalars, form), kept=operands)


MOST_ITEMS = 1000
"""Of a list that the step makes, and that a function gets with a number that changes."""


def scalars_in(operands: Iterable[Any]) -> Iterator[GraphScalar]:
    """The scalars among operands, and in lists among these."""
    for each in operands:
        if is_scalar(each):
            yield each
        elif type(each) in (list, tuple) and len(each) <= MOST_ITEMS:
            yield from scalars_in(each)


def has_scalars(operands: Iterable[Any]) -> bool:
    """Return whether there is any; unlike ``any``, asks them nothing."""
    return next(scalars_in(operands), None) is not None


def evaluate(operands: Iterable[Any], value_of: Callable[[GraphScalar], Any]) -> list[Any]:
    """Operands with values in the place of scalars."""
    return [
        value_of(each)
        if is_scalar(each)
        else type(each)(evaluate(each, value_of))
        if type(each) in (list, tuple) and has_scalars(each)
        else each
        for each in operands
    ]


def expression_of(operand: Any, questions: Questions) -> Expression:
    """Gives an operand. What lists and arrays hold is read in each call, and compared like all that the step reads."""
    if is_scalar(operand):
        return operand.of
    if type(operand) in (list, tuple) and has_scalars(operand):
        items = tuple(expression_of(each, questions) for each in operand)
        return Apply(list_of if type(operand) is list else tuple_of, items)
    return questions.borrow(operand) if isinstance(operand, list | np.ndarray) else Always(operand)


def list_of(*items: Any) -> list[Any]:
    """A list of these."""
    return [*items]


def tuple_of(*items: Any) -> tuple[Any, ...]:
    """A tuple of these."""
    return items


def _key_of(operand: Any) -> Any:
    if is_scalar(operand):
        return GraphScalar, id(operand)
    return type(operand), operand, f"{operand}" if type(operand) is float and not operand else ""


def _computed(
    function: Callable[..., Any], operands: tuple[Any, ...], scalars: Sequence[GraphScalar], form: NumberForm | None
) -> Any:
    of = Apply(function, tuple(expression_of(each, scalars[0].questions) for each in operands))
    if not all(each.is_known for each in scalars):
        return _unknown(function, operands, scalars, of, form)
    try:
        value = function(*evaluate(operands, attrgetter("value")))
    except Exception:  # which the program may expect
        _take_plainly(scalars)
        raise
    return _made(value, of, scalars, _in_graph(function, operands, value))


def _made(value: Any, of: Expression, scalars: Sequence[GraphScalar], build: Callable[[], Tensor] | None) -> Any:
    """Return what was computed of known numbers, as the program sees it."""
    questions = scalars[0].questions
    if isinstance(value, bool | np.bool_):
        questions.ask(of, None if value else operator.not_)
        return value
    if isinstance(value, tuple):
        parts = ((part, Apply(operator.getitem, (of, Always(index)))) for index, part in enumerate(value))
        return tuple(_made(part, of_part, scalars, None) for part, of_part in parts)
    if not isinstance(value, int | float | np.integer | np.floating):
        _take_plainly(scalars)
        return value
    is_users = any(each.is_users for each in scalars)
    return GraphScalar(value, of, questions, _device_of(scalars), is_users=is_users, build=build)


def _take_plainly(scalars: Sequence[GraphScalar]) -> None:
    for each in scalars:
        each.plain()


def _device_of(scalars: Sequence[GraphScalar]) -> torch.device:
    return next((each.device for each in scalars if each.device.type != "cpu"), scalars[0].device)


_LIGHT = frozenset({operator.add, operator.sub, operator.mul, operator.neg, abs})
"""What a graph computes of floats as Python does, without an error."""


def _in_graph(function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> Callable[[], Tensor] | None:
    """Return how the graph computes it of what it reads, to the last bit; ``None`` where the host does."""
    is_safe = function is operator.truediv and not is_scalar(operands[1])  # of a constant 0 there is no value
    plain = [each for each in operands if not is_scalar(each)]
    are_doubles = all(is_double(each.value) for each in operands if is_scalar(each)) and is_double(value)
    if not (
        (is_safe or function in _LIGHT)
        and are_doubles
        and all(type(each) in (int, float, np.float64) for each in plain)
    ):
        return None
    return lambda: function(*(each.in_graph() if is_scalar(each) else float(each) for each in operands))


# --- what the graph computes of numbers that it has -------------------------------------------------------------------


def _unknown(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    scalars: Sequence[GraphScalar],
    of: Expression,
    form: NumberForm | None,
) -> HostScalar:
    unknown = next(each for each in scalars if not each.is_known)
    if form is None and (form := _form_of(function, operands)) is None:
        unknown.refuse("The step makes a plain number of")
    if function not in _NEVER_FAIL and not form.is_answer and may_be_caught():
        unknown.refuse("The step computes what may fail, where that is caught, from")
    to_tensor = form.to_tensor
    plain = [each for each in operands if not is_scalar(each)]

    def build() -> Tensor:
        return to_tensor(*(each.in_graph() if is_scalar(each) else each for each in operands))

    can_build = all(is_within((each, each), INT64) for each in plain if isinstance(each, int))
    can_build = can_build and all(each.is_readable for each in scalars)
    number = HostScalar(
        of,
        unknown.questions,
        _device_of(scalars),
        frozenset[Leaf]().union(*(each.needs for each in scalars)),
        is_whole=form.is_whole,
        origin=unknown.origin,
        build=build if can_build else None,
        bounds=form.bounds,
    )
    number.is_answer = form.is_answer
    return number


def _form_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> NumberForm | None:
    """An operator's form; ``None`` for any other function."""
    are_whole = all(each.is_whole if is_scalar(each) else isinstance(each, int | np.integer) for each in operands)
    if function is operator.pow:
        are_whole = are_whole and (is_scalar(operands[1]) or operands[1] >= 0)
    if are_whole and function in _OF_WHOLE:
        most, usual = (_bounds(function, parts) for parts in zip(*map(bounds_of, operands), strict=True))
        return NumberForm(True, _OF_WHOLE[function], (most or BEYOND, usual or INT64))
    if (to_integer := _TO_WHOLE.get(function)) is not None:
        return NumberForm(True, lambda number: to_integer(number).to(torch.int64))
    to_tensor = _OF_FLOATS.get(function)
    return None if to_tensor is None else of_floats(to_tensor)


_NEVER_FAIL = (operator.add, operator.sub, operator.mul, operator.neg, abs)
"""What gives a number for any others: an error would come after the graph, and not where the program catches it."""

_TO_WHOLE: dict[Any, Callable[[Tensor], Tensor]] = {
    int: torch.trunc,
    math.trunc: torch.trunc,
    math.floor: torch.floor,
    math.ceil: torch.ceil,
}
"""Functions of one number that give a whole one."""


def of_floats(to_tensor: Callable[..., Tensor]) -> NumberForm:
    """The form of a function that gives floats.

    Args:
        to_tensor: Does the same to tensors in double precision, and to numbers.
    """
    return NumberForm(False, lambda *parts: to_tensor(*map(_as_double, parts)))


def of_answers(to_tensor: Callable[..., Tensor]) -> NumberForm:
    """The form of a function that gives ``True`` or ``False``, and never fails.

    Args:
        to_tensor: Does the same to tensors, and to numbers.
    """
    return NumberForm(True, lambda *parts: to_tensor(*parts).to(torch.int64), ((0, 1), (0, 1)), is_answer=True)


def _as_double(part: Any) -> Any:
    return part.to(torch.float64) if is_tensor(part) else float(part)


def _divisor(part: Any) -> Any:
    """The divisor, or 1 for those with which a division may end the process: 0, at which the host raises, and -1."""
    if is_tensor(part):
        return torch.where((part == 0) | (part == -1), 1, part)
    return 1 if part in (0, -1) else part


def _floor_divide(left: Any, right: Any) -> Tensor:
    quotient = left // _divisor(right)
    return torch.where(right == -1, -left, quotient) if is_tensor(right) else -left if right == -1 else quotient


_OF_FLOATS: dict[Any, Callable[..., Tensor]] = {
    each: each
    for each in (
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.neg, abs),
    )
}
_OF_WHOLE: dict[Any, Callable[..., Tensor]] = {
    **{each: each for each in (operator.add, operator.sub, operator.mul, operator.neg, operator.invert, abs)},
    **{each: each for each in (operator.and_, operator.or_, operator.xor)},
    operator.floordiv: _floor_divide,
    operator.mod: lambda left, right: left % _divisor(right),
    operator.pow: torch.pow,
}
"""Operators, and what does the same to tensors of whole numbers."""

MOST_POWER = 64
"""Of a whole number that is not 0 or ±1 a higher power needs more bits than that."""


def bounds_of(operand: Any) -> Bounds:
    """Between which numbers a whole one is."""
    if not is_scalar(operand):
        return ((int(operand), int(operand)),) * 2
    return operand.bounds if isinstance(operand, HostScalar) else (INT64, USUAL)


def _bounds(function: Any, parts: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Between which numbers an operator's result is; ``None`` where it may fail."""
    # What may be beyond 64 bits is checked by itself.
    known = [(max(part[0], INT64[0]), min(part[1], INT64[1])) for part in parts]
    if function in (operator.and_, operator.or_, operator.xor, operator.invert):
        return INT64
    if function in (operator.floordiv, operator.mod) and known[1][0] <= 0 <= known[1][1]:
        return None
    if function is operator.mod:
        return min(known[1][0] + 1, 0), max(known[1][1] - 1, 0)
    if function is operator.pow and not (known[1][0] >= 0 and known[1][1] <= MOST_POWER):
        return None
    corners = [function(*each) for each in itertools.product(*known)]
    if function is operator.pow:
        return -max(map(abs, corners)) - 1, max(map(abs, corners)) + 1
    return (0 if function is abs else min(corners)), max(corners)
