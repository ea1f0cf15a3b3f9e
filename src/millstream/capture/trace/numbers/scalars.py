"""Python numbers that a captured graph reads at run time, or that the host reads from its results.

While tracing, a ``GraphScalar`` stands where a learning rate, a counted step or a number of the user's stood. What is
computed of it is written down as an expression, by which the host computes the same before each replay; the graph reads
what operators take of it. A comparison is answered with the present value and remembered, because another answer needs
another graph; whoever takes it for a plain ``float`` gets one, which is remembered as well. A ``HostScalar`` stands for
what ``.item()`` gives: nobody knows its value yet, so that only arithmetic and text can be made of it, and the graph
computes that arithmetic.

They stand in the very objects that have the numbers, where other threads meet them, too. To everybody but the thread
that traces, and to that after the trace, they are the plain numbers: nothing is asked, and nothing becomes part of the
graph.

**Contract**
- A graph depends on the value of a number only through its inputs and through the questions in ``Questions``.
- What Python computes of numbers is computed by Python, so that whole numbers are exact whatever their size. The graph
  itself adds and multiplies numbers in double precision, as Python does, and whole ones in 64 bits.
- Like a Python number, and unlike a tensor, a scalar never changes the dtype of a floating-point result; nor does a
  whole number that of another whole number.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.expressions import (
    Apply,
    Expression,
)
from millstream.capture.effects.late_values import Later, Leaf, holds_token
from millstream.capture.lines import here, raise_refusal
from millstream.capture.record.location import MISSING
from millstream.capture.state.signature import is_other
from millstream.capture.trace.numbers.questions import MOST_WAYS, Questions
from millstream.capture.trace.numbers.whole_numbers import fits_int64
from millstream.errors import CaptureError

CLOCK = "a clock"
"""Origin of numbers that are known after the step, and only then."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """Makes text of a value."""

    spec: str

    def __call__(self, value: Any) -> str:
        return format(value, self.spec)


class GraphScalar(torch.SymFloat):
    """A number with a value known now, which the host computes anew before each replay.

    It is a ``SymFloat`` only in order that PyTorch's argument parser lets it pass to the tracer's function mode, which
    replaces it.

    Args:
        value: The present value.
        of: The same value from the lifted numbers.
        questions: Receives what the program asks.
        device: Where the graph has it.
        is_users: Whether it is a number of the user's, which may be whole in one call and not in the next.
        build: How the graph computes it; ``None`` where it is an input.

    Attributes:
        casts: Its tensor in other dtypes.
    """

    is_known = True
    needs: frozenset[Leaf] = frozenset()
    origin = ""

    def __init__(
        self,
        value: Any,
        of: Expression,
        questions: Questions,
        device: torch.device,
        *,
        is_users: bool = False,
        build: Callable[[], Tensor] | None = None,
    ) -> None:
        self.value = value
        self.of = of
        self.questions = questions
        self.device = device
        self.is_users = is_users
        self.casts: dict[torch.dtype, Tensor] = {}
        self._build = build
        self._tensor: Tensor | None = None
        # With each parameter an optimizer computes the same of the one number of its steps: the host does it once.
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    @property
    def is_asked_by_others(self) -> bool:
        """Whether anybody but the traced program is at work: another thread, or who has kept it beyond the trace."""
        return threading.get_ident() != self.questions.thread

    def outside(self) -> Any:
        """Return what it is to others: what was there before, as if the step had not run yet."""
        number = self.questions.before(self)
        if number is MISSING:
            return self.value
        return number.value if is_scalar(number) else number

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` finds, beside the type: programs ask whether they were given a number."""
        return int if self.is_whole else float

    @property
    def is_whole(self) -> bool:
        """Whether the number is an integer, and not one by chance."""
        answer = isinstance(self.value, int | np.integer)
        if self.is_users and not self.is_asked_by_others:
            self.once((is_whole,), lambda: self.questions.ask(self.of, is_whole if answer else _is_not_whole))
        return answer

    @property
    def has_integer(self) -> bool:
        """The same, without a question: for who reads the number, as inputs are checked."""
        return isinstance(self.value, int | np.integer)

    @property
    def is_readable(self) -> bool:
        """Whether the graph can have it."""
        return fits_int64(self.value) or not self.has_integer

    def as_tensor_for(self, other: Tensor | None) -> Any:
        """Return what takes part for it in an operation with ``other``.

        A tensor in the dtype that a Python number has there.

        The plain number where there is no such tensor.
        """
        if self.is_known and not self.is_readable:
            return self.plain()
        if other is not None and other.dtype in (torch.float64, torch.complex128):
            dtype = torch.float64
        elif other is not None and (other.is_floating_point() or other.is_complex()):
            dtype = torch.float32
        else:
            dtype = torch.int64 if self.has_integer else torch.get_default_dtype()
        return self.in_dtype(dtype)

    def in_dtype(self, dtype: torch.dtype) -> Tensor:
        """The tensor in another dtype."""
        if dtype not in self.casts:
            self.casts[dtype] = self.in_graph().to(dtype)
        return self.casts[dtype]

    def in_graph(self) -> Tensor:
        """The tensor that holds it at run time: int64 for a whole number, float64 for another."""
        if self._tensor is None:
            self._tensor = self._read() if self._build is None else self._build()
        return self._tensor

    def _read(self) -> Tensor:
        return self.questions.read(self.of, self.value, self.device, is_users=self.is_users)

    def plain(self) -> int | float:
        """The present value, on which the graph depends from here on."""
        if self.is_asked_by_others:
            return self.outside()  # type: ignore[no-any-return]
        draws = self.questions.draws_for(self.of)
        num_answers = math.prod(draw.num_values or MOST_WAYS + 1 for draw in draws)
        if draws and num_answers > MOST_WAYS:
            raise_refusal(
                self.questions.refused.append,
                f"The step needs the very value of what {draws[0].name} gives, as for an index or a size.",
                "Draw it outside of the step, and pass it as an argument; or draw with PyTorch's functions.",
            )
        is_same = functools.partial(_is_same, self.value)
        self.once((), lambda: self.questions.ask(self.of, is_same, num_answers=num_answers))
        return int(self.value) if self.is_whole else float(self.value)  # NumPy's are of other types

    def __float__(self) -> float:
        return float(self._converted())

    def __int__(self) -> int:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        return int(self._converted())

    def __index__(self) -> int:
        return operator.index(self._converted())  # type: ignore[arg-type] # raises what a float raises

    def _converted(self) -> int | float:
        if not self.is_asked_by_others:
            self.questions.num_converted += 1
        return self.plain()

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __getattr__(self, name: str) -> Any:
        """What numbers have besides: ``bit_length()``, ``real``."""
        number = self.outside() if self.is_asked_by_others else self.value
        if name == "node":  # PyTorch, which would compute with what it does not know
            if self.is_asked_by_others:
                raise CaptureError(
                    "PyTorch was given a number of a step that another thread captures just now.",
                    where=here(),
                    remedy="Give it int(number) or float(number).",
                )
            raise_refusal(
                self.questions.refused.append,
                "PyTorch was given a number that changes where it takes none.",
                HOST_REMEDY if self.needs else "Give it int(number) or float(number): each value has a graph then.",
            )
        if name.startswith("__") or not hasattr(number, name):
            raise AttributeError(f"'{type(number).__name__}' object has no attribute '{name}'")
        return getattr(self.plain(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.plain(), dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        number = self.plain()
        return type(number), (number,)

    def __copy__(self) -> Any:
        return self.plain() if self.is_asked_by_others else self

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __repr__(self) -> str:
        return self.text_by(repr)

    def __str__(self) -> str:
        return self.text_by(str)

    def __format__(self, spec: str) -> str:
        if holds_token(spec):
            raise_refusal(
                self.questions.refused.append,
                "The step formats a number by another one that changes.",
                "Let ms.callback format it, as in ms.callback(show, value, digits).",
            )
        if self.is_known and not self.is_asked_by_others:
            format(self.value, spec)  # for its error
        return self.text_by(Formatted(spec))

    def text_by(self, make: Callable[[Any], str]) -> str:
        """Text that is made of the number, which stands for itself until that is known."""
        if self.is_asked_by_others:
            return make(self.outside())
        return self.questions.text(Apply(make, (self.of,)), self.needs)

    def __pos__(self) -> Any:
        return self.plain() if self.is_asked_by_others else self

    def refuse(self, what: str) -> NoReturn:
        """Raise that the step does something for which a value must be known that is not; told also if swallowed."""
        if self.origin is CLOCK:
            raise_refusal(
                self.questions.refused.append,
                "The step reads a clock, which gives something else each time.",
                "Read it outside of the step, and pass what depends on it as an argument.",
            )
        remedy = HOST_REMEDY if self.needs else "Do that outside of the step, after it."
        raise_refusal(self.questions.refused.append, f"{what} {self.origin}.", remedy)

    def once(self, key: Any, make: Callable[[], Any], kept: Any = None) -> Any:
        """Return what ``make`` gives, the first time for this key; ``kept`` lives as long: its id stays its own."""
        try:
            known = self._known.get(key)
        except TypeError:  # it cannot be hashed
            return make()
        if known is None:
            known = self._known[key] = kept, make()
        return known[1]


HOST_REMEDY = (
    "Its value is known after the step: format it with f-strings, log it, return it; for a branch use torch.where, or"
    " decide in ms.callback(function, value)."
)


def is_scalar(value: Any) -> TypeGuard[GraphScalar]:
    """Return whether it is a scalar of a graph; unlike ``isinstance``, asks it nothing."""
    return issubclass(type(value), GraphScalar)


def is_size(value: Any) -> bool:
    """The same of numbers that are computed from sizes, which each call brings anew."""
    return issubclass(type(value), (torch.SymInt, torch.SymFloat)) and not is_scalar(value)


def is_known_later(value: Any) -> bool:
    """Return whether it stands for a number or an array that each call brings, or is text with one in it."""
    if issubclass(type(value), Later):
        return True
    return is_scalar(value) or is_size(value) or (isinstance(value, str) and holds_token(value))


def as_scalar(value: Any) -> Any:
    """A number of sizes, or of an array, as one that the host knows after a replay; anything else as it is."""
    return value.scalar() if is_size(value) or issubclass(type(value), Later) else value


_NUMBERS = (int, float, np.floating, np.integer)


def is_number(value: Any) -> bool:
    """Return whether a graph can read ``value`` at run time: a real number, of NumPy too (schedulers), and no ``bool``.

    While tracing, a graph's scalar is one.
    """
    kind = type(value)
    if kind is float or kind is int:  # asked in each call with a number that changes
        return True
    return is_scalar(value) or (isinstance(value, _NUMBERS) and not isinstance(value, bool))


def is_tensor(value: Any) -> bool:
    """The same of tensors."""
    return issubclass(type(value), Tensor)


def is_whole(number: Any) -> bool:
    """Return whether a number, or what a scalar stands for, is an integer."""
    return bool(number.is_whole) if is_scalar(number) else isinstance(number, int | np.integer)


def _is_not_whole(number: Any) -> bool:
    return not is_whole(number)


def _is_same(value: Any, now: Any) -> bool:
    return now is value or not is_other(now, value)


def plain_of(value: Any) -> Any:
    """A value with the present numbers in the place of scalars."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(plain_of, value))
    return value.plain() if is_scalar(value) else value
