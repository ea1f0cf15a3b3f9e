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

import contextlib
import functools
import gc
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.drawn import Drawing
from millstream.capture.effects.expressions import (
    FAILURES,
    Always,
    Apply,
    Ask,
    Draw,
    Expression,
    GraphRead,
    Nth,
    compile_steps,
    indices_in,
    kind_of,
)
from millstream.capture.effects.late_values import Later, Leaf, Texts, holds_token
from millstream.capture.lines import here, raise_refusal, stopped_at, stops_in_debugger
from millstream.capture.record.location import MISSING
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.signature import is_other
from millstream.errors import CaptureError
from millstream.heap import objects_of_types

Numbers: TypeAlias = Sequence[Any]
"""Values of all numbers that a graph reads, in the order in which they were lifted."""


LOOKAHEAD = 1000
"""Calls: what an optimizer does every so often it does within so many."""

MOST_EXACT = 2**53
"""Whole numbers up to this size are floats without rounding."""

INT64 = -(2**63), 2**63 - 1
"""The least and the greatest whole number that a graph reads."""

USUAL = -(2**31), 2**31
"""Between these are counts and sizes as a rule."""

CLOCK = "a clock"
"""Origin of numbers that are known after the step, and only then."""

MOST_WAYS = 8
"""That random numbers may lead: each has a graph of its own."""

Bounds: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Between which numbers a whole one is in any case, and as a rule."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A number that the graph reads, or an array."""

    of: Expression
    # that stands for it while the step is traced: int64 for a whole number, float64 for another; an array's is alike
    tensor: Tensor


@dataclass(slots=True)
class Questions:
    """Questions of the traced program about the values of its numbers, and what its graph reads of them."""

    new_input: Callable[[GraphScalar, torch.dtype], Tensor]  # makes an input of the graph
    # likewise for an array: of a shape, dtype and device
    new_array: Callable[[Sequence[int], torch.dtype, torch.device], Tensor] | None = None
    # questions, inputs and draws, in the order of the program
    steps: list[Ask | GraphRead | Draw] = field(default_factory=list)
    num_before: int = 0  # numbers that come before those that are drawn: what was lifted, and sizes
    drawn: list[Any] = field(default_factory=list)  # random numbers, as they were drawn last
    inputs: list[Input] = field(default_factory=list)
    refused: list[CaptureError] = field(default_factory=list)  # what it asked of values that nobody knows yet
    texts: Texts = field(default_factory=Texts)  # text made of them
    num_converted: int = 0  # how often Python has made a plain number of one that would go on as it is
    thread: int | None = field(default_factory=threading.get_ident)  # that traces; ``None`` after the trace
    borrowed: list[tuple[Always, Any]] = field(default_factory=list)  # lists that the host reads, and copies of them
    # gives what was there before the program put a number that nobody knows yet there; ``MISSING`` where it did not
    before: Callable[[Any], Any] = lambda number: MISSING
    # has the host compute a number after each replay, for the error that this may be
    check: Callable[[HostScalar], object] = lambda number: None
    # has what a branch on a number leads to run after the replay: the outcome to go on with, ``None`` where it cannot
    branch: Callable[[HostScalar], bool | None] = lambda number: None
    _compute: Callable[[Numbers], list[Any] | None] | None = None
    _draw: Drawing | None = None
    _num_ways: int = 1  # that random numbers may lead

    def text(self, of: Expression, needs: frozenset[Leaf]) -> str:
        """Text that stands for what ``of`` will give, from what ``needs`` says; not for a debugger to show."""
        if (where := stopped_at()) is not None:
            self.refused.append(stops_in_debugger(where))
            raise self.refused[-1]
        return self.texts.token(of, needs, here())

    def borrow(self, container: Any) -> Always:
        """A list or array that the host reads in each call, as it is then."""
        expression = Always(container)
        self.borrowed.append((expression, container.copy()))
        return expression

    def return_borrowed(self) -> None:
        """The program has ended: of what it has changed since the host was to read it, the host reads what was there.

        That is what it makes in each call. What others hold it may not change.
        """
        for expression, before in self.borrowed:
            now = expression.value
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                if isinstance(now, np.ndarray) and now.shape == before.shape and now.tobytes() == before.tobytes():
                    continue  # whose items are made anew each time
                expression.value = before

    def ask(self, of: Expression, is_answer: Callable[[Any], bool] | None = None, *, num_answers: int = 2) -> None:
        """Let the graph depend on what ``of`` gives, which may be one of so many."""
        if self.draws_for(of):
            self._num_ways *= num_answers
            if self._num_ways > MOST_WAYS:
                raise_refusal(
                    self.refused.append,
                    f"The step decides by random numbers between more than {MOST_WAYS} ways.",
                    "Draw outside of the step, and pass what is to be done; or use torch.where.",
                )
        self.add(Ask(of, is_answer))

    def read(self, number: GraphScalar) -> Tensor:
        """Let the graph read a number."""
        dtype, check = torch.float64, _is_other_float
        if number.has_integer:
            dtype, check = torch.int64, fits_int64
        elif is_double(number.value):
            check = is_double if number.is_users else _is_double_or_exact
        return self._read(number.of, check, self.new_input(number, dtype))

    def read_array(self, of: Expression, value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Let the graph read an array, which is ``value`` this time, as a tensor of ``dtype`` on a device."""
        assert self.new_array is not None
        kind = kind_of(value)
        return self._read(of, lambda now: kind_of(now) == kind, self.new_array(value.shape, dtype, device))

    def _read(self, of: Expression, check: Callable[[Any], bool], tensor: Tensor) -> Tensor:
        self.inputs.append(Input(of, tensor))
        self.add(GraphRead(of, check))
        return tensor

    def take(self, draw: Draw, value: Any) -> Nth:
        """Have the host draw a random number, which is ``value`` this time; returns what gives it in each call."""
        self.add(draw)
        self.drawn.append(value)
        return Nth(self.num_before + len(self.drawn) - 1)

    @property
    def draws(self) -> list[Draw]:
        """The random numbers that the host draws."""
        return [step for step in self.steps if isinstance(step, Draw)]

    def draws_for(self, of: Expression) -> list[Draw]:
        """The random numbers by which it is decided what ``of`` gives."""
        if not self.drawn:
            return []
        draws = self.draws
        return [draws[index - self.num_before] for index in sorted(indices_in(of)) if index >= self.num_before]

    def add(self, step: Ask | GraphRead | Draw) -> None:
        """Add what comes next in the program."""
        self.steps.append(step)
        self._compute = self._draw = None

    def derive(self, numbers: Numbers) -> list[Any] | None:
        """Return what the graph reads where these are the numbers.

        ``None`` if the graph does not hold for them: a program with these numbers would get other answers, or fail.
        """
        if self._compute is None:
            self._compute = compile_steps(self.steps)
        try:
            return self._compute(self._with_drawn(numbers))
        except FAILURES:
            return None

    def draw(self, numbers: Numbers) -> list[Any] | None:
        """The same, with random numbers that are drawn now; where the graph does not hold, nothing is drawn."""
        if self._draw is None:
            self._draw = Drawing(self.steps, self.num_before)
        made = self._draw(numbers)
        if made is None:
            return None
        derived, self.drawn = made
        return derived

    def readable(self, text: str, numbers: Numbers) -> str:
        """Text for people, with numbers in the place of what stands for them."""
        return self.texts.readable(text, self._with_drawn(numbers))

    def names(self, before: Sequence[str]) -> list[str]:
        """Names of all numbers, for people, from those of what was lifted."""
        return [*before, *["size"] * (self.num_before - len(before)), *(f"{draw.name}()" for draw in self.draws)]

    def _with_drawn(self, numbers: Numbers) -> Numbers:
        if not self.drawn or len(numbers) > self.num_before:
            return numbers
        return [*numbers, *[None] * (self.num_before - len(numbers)), *self.drawn]

    def allow(self, numbers: Numbers) -> bool:
        """Return whether the graph holds for these numbers."""
        return self.derive(numbers) is not None

    def allow_again(self, numbers: Numbers, successors: dict[int, Callable[[Numbers], Any]]) -> bool:
        """Return whether the graph will hold once more, if nobody but the program changes its numbers.

        Args:
            numbers: As they are now.
            successors: By position, what the program makes of those that it changes.
        """
        numbers = self._with_drawn(numbers)
        with contextlib.suppress(*FAILURES):  # where the program would raise as well
            for _ in range(LOOKAHEAD):
                numbers = [successors[i](numbers) if i in successors else each for i, each in enumerate(numbers)]
                if self.allow(numbers):
                    return True
        return False


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
            self._tensor = self.questions.read(self) if self._build is None else self._build()
        return self._tensor

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


class HostScalar(GraphScalar, Later):
    """A number that the host knows only after the graph has run.

    Args:
        of: Gives it from ``Values``.
        questions: Receives what the program asks, which is refused.
        device: Where the graph has it.
        needs: What ``of`` reads of the graph's results.
        is_whole: Whether it is an integer.
        origin: Where it comes from, for people.
        build: How the graph computes it; ``None`` if it cannot.
        bounds: Of a whole number the least and the greatest that it may be, and that it is as a rule.

    Attributes:
        bounds: Likewise.
        is_answer: Whether it is a ``bool``.
    """

    is_known = False
    is_answer = False

    def __init__(
        self,
        of: Expression,
        questions: Questions,
        device: torch.device,
        needs: frozenset[Leaf],
        *,
        is_whole: bool,
        origin: str,
        build: Callable[[], Tensor] | None = None,
        bounds: Bounds = (INT64, INT64),
    ) -> None:
        super().__init__(None, of, questions, device, build=build)
        self.needs = needs
        self.origin = origin
        self.bounds = bounds
        self._is_whole = is_whole

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return bool if self.is_answer else int if self.is_whole else float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.outside(), int | np.integer) if self.is_asked_by_others else self._is_whole

    @property
    def has_integer(self) -> bool:
        return self._is_whole

    @property
    def is_readable(self) -> bool:
        return self._build is not None

    def outside(self) -> Any:
        """Return what was there before: for others the call that brings this number has not ended."""
        number = self.questions.before(self)
        if number is MISSING:
            raise CaptureError(
                "This number is known only after the call of a step that captures it in another thread.",
                where=here(),
                remedy="Read it again after that call.",
            )
        return number.outside() if is_scalar(number) else number

    def in_graph(self) -> Tensor:
        if self._build is None:
            self.refuse("The step computes with")
        if self._tensor is None and self._is_whole:
            most, usual = (is_within(each, INT64) for each in self.bounds)
            if not usual:
                self.refuse("The step computes what may take more than 64 bits from")
            if not most:
                self.questions.check(self)
        return super().in_graph()

    def plain(self) -> Any:
        if self.is_asked_by_others:
            return self.outside()
        return self.refuse("The step makes a plain number of")


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


def is_within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Return whether whole numbers between the bounds of ``inner`` are between those of ``outer``."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def fits_int64(number: Any) -> bool:
    """Return whether it is a whole number that a graph can read."""
    kind = type(number)
    return (kind is int or issubclass(kind, np.integer)) and INT64[0] <= number <= INT64[1]


def is_double(number: Any) -> bool:
    """Return whether Python computes with it in double precision."""
    return type(number) in (float, np.float64)


def _is_double_or_exact(number: Any) -> bool:
    """The same, or a whole number in its place, which is none of the user's: a learning rate of 1."""
    return is_double(number) or (type(number) is int and abs(number) <= MOST_EXACT)


def _is_other_float(number: Any) -> bool:
    return isinstance(number, np.floating) and not is_double(number)


def _is_not_whole(number: Any) -> bool:
    return not is_whole(number)


def _is_same(value: Any, now: Any) -> bool:
    return now is value or not is_other(now, value)


def plain_of(value: Any) -> Any:
    """A value with the present numbers in the place of scalars."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(plain_of, value))
    return value.plain() if is_scalar(value) else value


def give_back(questions: Questions) -> None:
    """After a trace, put numbers where other threads have kept what stood for them: ``log.append(trainer.count)``."""
    questions.thread = None
    if not others_may_write():
        return
    kept = [each for each in objects_of_types([GraphScalar, HostScalar]) if each.questions is questions]
    for holder in gc.get_referrers(*kept) if kept else ():
        if holder is kept:
            continue
        if not issubclass(type(holder), dict | list | deque):
            with contextlib.suppress(AttributeError):  # a proxy's ``__getattr__`` would lead to another object
                holder = object.__getattribute__(holder, "__dict__")
        # Methods of subclasses are the user's: ``__missing__`` would bring back what was removed.
        kind: Any = next((kind for kind in (dict, list, deque) if issubclass(type(holder), kind)), None)
        if kind is None:
            continue
        get = dict.get if kind is dict else kind.__getitem__
        for key, value in [*(dict.items(holder) if kind is dict else enumerate(kind.__iter__(holder)))]:
            if is_scalar(value) and value.questions is questions:
                with contextlib.suppress(CaptureError, LookupError):  # there was none before; it has gone by now
                    plain = value.plain()
                    if get(holder, key) is value:
                        kind.__setitem__(holder, key, plain)
