"""What a traced program asks of its numbers, and what its graph reads of them.

A graph depends on the value of a number only through its inputs and through these questions.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.drawn import Drawing
from millstream.capture.effects.expressions import (
    FAILURES,
    Always,
    Ask,
    Draw,
    Expression,
    GraphRead,
    Nth,
    compile_steps,
    indices_in,
    kind_of,
)
from millstream.capture.effects.late_values import Leaf, Texts
from millstream.capture.lines import here, raise_refusal, stopped_at, stops_in_debugger
from millstream.capture.record.location import MISSING
from millstream.capture.trace.numbers.whole_numbers import MOST_EXACT, fits_int64, is_double
from millstream.errors import CaptureError

Numbers: TypeAlias = Sequence[Any]
"""Values of all numbers that a graph reads, in the order in which they were lifted."""

LOOKAHEAD = 1000
"""Calls: what an optimizer does every so often it does within so many."""

MOST_WAYS = 8
"""That random numbers may lead: each has a graph of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A number that the graph reads, or an array."""

    of: Expression
    # that stands for it while the step is traced: int64 for a whole number, float64 for another; an array's is alike
    tensor: Tensor


@dataclass(slots=True)
class Questions:
    """Questions of the traced program about the values of its numbers, and what its graph reads of them."""

    # makes an input of the graph for what gives a number, on a device
    new_input: Callable[[Expression, torch.device, torch.dtype], Tensor]
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
    check: Callable[[Any], object] = lambda number: None
    # has what a branch on a number leads to run after the replay: the outcome to go on with, ``None`` where it cannot
    branch: Callable[[Any], bool | None] = lambda number: None
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

    def read(self, of: Expression, value: Any, device: torch.device, *, is_users: bool) -> Tensor:
        """Let the graph on a device read a number, which is ``value`` this time."""
        dtype, check = torch.float64, _is_other_float
        if isinstance(value, int | np.integer):
            dtype, check = torch.int64, fits_int64
        elif is_double(value):
            check = is_double if is_users else _is_double_or_exact
        return self._read(of, check, self.new_input(of, device, dtype))

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


def _is_double_or_exact(number: Any) -> bool:
    """The same, or a whole number in its place, which is none of the user's: a learning rate of 1."""
    return is_double(number) or (type(number) is int and abs(number) <= MOST_EXACT)


def _is_other_float(number: Any) -> bool:
    return isinstance(number, np.floating) and not is_double(number)
