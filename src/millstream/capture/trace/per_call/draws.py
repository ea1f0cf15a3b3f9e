"""Random numbers and arrays of Python's and NumPy's in a step: the host draws them before each replay, in order.

While a step is traced, a copy of each generator gives the numbers, and the generators themselves are not touched.

**Contract**
- Before each replay the generators are asked for the same numbers in the same order as eager Python would ask them.
- A graph that then does not hold, or fails to be built, leaves the generators as they were.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from millstream.capture.effects.expressions import Apply, Draw, Expression, computes_the_same, kind_of
from millstream.capture.effects.host_generators import GENERATORS, StandsForGenerator, copy_of
from millstream.capture.lines import raise_refusal
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.trace.numbers.arithmetic import evaluate, expression_of, has_scalars, scalars_in
from millstream.capture.trace.numbers.known_arrays import known
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import is_known_later, is_number, is_scalar, is_tensor
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.errors import CaptureError

REMEDY = "Do that outside of the step, or draw with PyTorch's functions."

_CHANGING = frozenset({"seed", "shuffle", "setstate", "set_state", "spawn"})
"""Methods of generators that do something else than to draw."""

_METHODS = (types.MethodType, types.BuiltinFunctionType)

READING = frozenset({"getstate", "get_state"})
"""Methods that give the state of a generator."""

_STATES = frozenset({"bit_generator", "_bit_generator", "gauss_next"})
"""Attributes that lead to it."""


class Draws:
    """Random numbers that one trace draws.

    Args:
        questions: Of the trace.
        recorder: Active as long as the step runs.
        device: Of the graph.
        given: What the first ones are to be; the others are drawn.
        refuse: Told why the step cannot be captured, as the program may catch that.
        is_before: Whether a list was there before the step, or may have been.
    """

    def __init__(
        self,
        questions: Questions,
        recorder: EffectRecorder,
        device: torch.device,
        given: Sequence[Any],
        refuse: Callable[[CaptureError], object],
        is_before: Callable[[Any], bool],
    ) -> None:
        self._questions, self._recorder, self._device = questions, recorder, device
        self._is_before = is_before
        self._given, self._refuse = given, refuse
        self._copies: dict[int, Any] = {}

    def method(self, generator: Any, name: str, label: str) -> Callable[..., Any]:
        """Return what a program gets for a method of a generator.

        Args:
            generator: The user's.
            name: Of the method.
            label: It, for people.
        """
        if name in READING:
            return self._reading(getattr(generator, name), label)

        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self.is_asked_by_step:  # somebody else may have kept this function
                return getattr(generator, name)(*args, **kwargs)
            operands = [*args, *kwargs.values()]
            if name == "shuffle" and len(operands) == 1 and self._can_shuffle(operands[0]):
                operands[0][:] = self._drawn(generator, name, label, [*operands[0]], ())
                return None
            if name in _CHANGING or not all(map(_is_known, operands)):
                self.refuse(f"calls {label}")
            return self._drawn(generator, name, label, operands, tuple(kwargs))

        return draw

    def _can_shuffle(self, items: Any) -> bool:
        """Whether it is a list of numbers that the step has made."""
        return type(items) is list and all(map(is_number, items)) and _is_known(items) and not self._is_before(items)

    @property
    def is_asked_by_step(self) -> bool:
        """Whether it is the traced program that asks."""
        return self._recorder.is_active

    def stand_in(self, name: str, value: Any) -> Any:
        """Return what is to stand where a step finds a generator or a method of one; ``None`` for all else."""
        if type(value) in GENERATORS:
            return TracedGenerator(value, self, name)
        if type(value) not in _METHODS or type(value.__self__) not in GENERATORS:
            return None
        return functools.update_wrapper(self.method(value.__self__, value.__name__, name), value)

    def read(self, generator: Any, name: str, label: str) -> Any:
        """Return what the program gets for an attribute of a generator."""
        value = getattr(generator, name)
        if not self.is_asked_by_step:
            return value
        if callable(value):
            return self.method(generator, name, label)
        if name in _STATES and self._questions.drawn:
            self.refuse(f"reads {label}")
        return value

    def refuse(self, what: str) -> None:
        """Say that the step does what cannot be captured."""
        raise_refusal(self._refuse, f"The step {what}, which a graph would not do again.", REMEDY)

    def _reading(self, original: Callable[..., Any], label: str) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if self._questions.drawn:
                self.refuse(f"calls {label}")
            return original(*args, **kwargs)

        return read

    def _drawn(self, generator: Any, name: str, label: str, operands: list[Any], names: tuple[str, ...]) -> Any:
        if id(generator) not in self._copies:
            self._copies[id(generator)] = unseen(copy_of, generator)
        questions = self._questions
        method = _method(generator, name)
        of = Apply(_with_names(method, names), tuple(expression_of(each, questions) for each in operands))
        plain = evaluate(operands, attrgetter("value"))
        value = unseen(_with_names(_method(self._copies[id(generator)], name), names), *plain)
        if len(questions.drawn) < len(self._given):
            value = self._given[len(questions.drawn)]
        num_values = _num_values(name, plain[: len(plain) - len(names)]) if not has_scalars(operands) else None
        is_one_of = name == "choice" and num_values is not None and isinstance(generator, random.Random)
        read: Expression = questions.take(Draw(of, generator, label, kind_of(value), num_values), value)
        if is_one_of and not is_number(value) and not isinstance(value, bool | np.bool_):
            questions.ask(read, functools.partial(is_, value), num_answers=num_values or 1)
            return value
        made = known(value, read, questions, self._device)
        if made is None:
            self.refuse(f"calls {label}")
        return made


class TracedGenerator(StandsForGenerator):
    """Stands where a step finds a generator: to everybody but the thread that traces it is that.

    Args:
        generator: The user's.
        draws: Records what it draws.
        name: Of the place, for people.
    """

    def __init__(self, generator: Any, draws: Draws, name: str) -> None:
        self._own = generator, draws, name
        self.__wrapped__ = generator

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` finds, beside the type."""
        return type(self._own[0])

    def __getattr__(self, name: str) -> Any:
        generator, draws, place = self._own
        return draws.read(generator, name, f"{place}.{name}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        generator, draws, place = self._own
        if draws.is_asked_by_step:
            draws.refuse(f"copies {place}")
        return generator.__reduce_ex__(protocol)


def are_alike(one: Draw, other: Draw) -> bool:
    """Return whether two traces have drawn a number in the same way."""
    is_same = one.generator is other.generator and one.name == other.name and one.kind == other.kind
    mine, others = one.of.operands, other.of.operands
    return is_same and len(mine) == len(others) and all(map(computes_the_same, mine, others))


def _num_values(name: str, args: Sequence[Any]) -> int | None:
    """Return how many values a method may give; ``None`` where that is not known, or more than a few."""
    match name, [*args]:
        case "choice", [list() | tuple() as items]:
            return len(items)
        case "randint" | "randrange" | "integers" | "choice", [int(most)]:
            return most
        case "randint" | "randrange" | "integers", [int(least), int(most)]:
            return most - least + 1
        case "getrandbits", [int(most)]:
            return 2**most
    return None


def _is_known(operand: Any) -> bool:
    if is_tensor(operand) or (is_known_later(operand) and not is_scalar(operand)):
        return False
    return all(each.is_known for each in scalars_in([operand]))


def _method(generator: Any, name: str) -> Callable[..., Any]:
    """A method that gives what it draws."""
    return functools.partial(_shuffled, generator) if name == "shuffle" else getattr(generator, name)


def _shuffled(generator: Any, *items: Any) -> list[Any]:
    generator.shuffle(shuffled := [*items])
    return shuffled


def _with_names(method: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A method whose last arguments have these names."""
    if not names:
        return method

    def call(*args: Any) -> Any:
        first = len(args) - len(names)
        return method(*args[:first], **dict(zip(names, args[first:], strict=True)))

    return call
