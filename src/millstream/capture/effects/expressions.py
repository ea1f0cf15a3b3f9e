"""Expressions of numbers that each call brings, and one function on the host that computes many of them.

An expression is made while a step is traced and evaluated in each call: it gives what Python would have computed there.
Nothing here touches a device or PyTorch.

**Contract**
- An expression is a function of the numbers (or of ``Values``) alone, and gives the same for the same.
- What is shared between expressions is computed once, and what comes first in the program is computed first: a branch
  that the program would not take is not looked into.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Expression: TypeAlias = Callable[[Any], Any]
"""Gives a value from ``Values``; from a plain list of numbers where it reads nothing else."""

FAILURES = (ArithmeticError, ValueError, TypeError, LookupError)
"""What Python raises where it computes with numbers."""

MOST_TEXT = 120
"""Characters of an expression that people are shown."""


@dataclass(frozen=True, slots=True)
class Nth:
    """A number that the graph reads."""

    index: int

    def __call__(self, numbers: Any) -> Any:
        return numbers[self.index]


@dataclass(slots=True, eq=False)
class Always:
    """The same in every call."""

    value: Any

    def __call__(self, _: Any) -> Any:
        return self.value


@dataclass(slots=True, eq=False)
class Apply:
    """The result of a function of other expressions."""

    function: Callable[..., Any]
    operands: tuple[Expression, ...]
    _run: Callable[[Any], Any] | None = field(default=None, init=False)

    def __call__(self, values: Any) -> Any:
        if self._run is None:
            self._run = _Source().returning([self])
        return self._run(values)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A question about the numbers: the graph holds only where the answer is the same."""

    of: Expression
    is_answer: Callable[[Any], bool] | None  # ``None`` for what is to be true


@dataclass(frozen=True, slots=True, eq=False)
class GraphRead:
    """A number that the graph reads."""

    of: Expression
    check: Callable[[Any], bool]  # whether the graph can take it


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A random number, array or list that the host draws in each call; it comes after the numbers that are given."""

    of: Apply  # the generator's method and what it is given
    generator: Any  # of Python's or NumPy's
    name: str  # of the method, for people
    kind: Any  # what ``kind_of`` gives for it
    num_values: int | None = None  # how many it may be; ``None`` for many


def kind_of(value: Any) -> Any:
    """A number's type; of an array shape and dtype, too, and of a list the kinds of its items."""
    if isinstance(value, list):
        return list, *map(kind_of, value)
    shape = getattr(value, "shape", ())
    return (type(value), shape, value.dtype) if shape else type(value)


def compile_steps(
    steps: Sequence[Ask | GraphRead | Draw], *, is_drawing: bool = False
) -> Callable[[Any], list[Any] | None]:
    """One function for all of ``steps``, in their order.

    Args:
        steps: What to do.
        is_drawing: Whether to draw, and to add that to the list of numbers; otherwise it has them already.

    Returns:
        It gives what the graph reads of the numbers it is given; ``None`` where an answer is another or a check fails.
    """
    source = _Source()
    read = []
    for step in steps:
        if isinstance(step, Draw):
            if is_drawing:
                name = source.name_of(step.of)
                kind = source.constant(step.kind)
                is_plain = isinstance(step.kind, type)
                test = f"type({name}) is not {kind}" if is_plain else f"{source.constant(kind_of)}({name}) != {kind}"
                source.lines.append(f"if {test}: return None")
                source.lines.append(f"n.append({name})")
            continue
        name = source.name_of(step.of)
        if isinstance(step, GraphRead):
            read.append(name)
            name = f"{source.constant(step.check)}({name})"
        elif step.is_answer is not None:
            name = f"{source.constant(step.is_answer)}({name})"
        source.lines.append(f"if not {name}: return None")
    return source.function(f"[{', '.join(read)}]")


class _Source:
    """The text of a function of ``n``, the numbers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._scope: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Expression] = []  # whose ids are names

    def returning(self, expressions: Sequence[Expression]) -> Callable[[Any], Any]:
        names = [*map(self.name_of, expressions)]
        return self.function(f"[{', '.join(names)}]")

    def function(self, result: str) -> Callable[[Any], Any]:
        text = "\n    ".join(["def compute(n):", *self.lines, f"return {result}"])
        exec(text, self._scope)  # noqa: S102 - of our own text: it takes a third of the time of calls that call each other
        return self._scope["compute"]  # type: ignore[no-any-return]

    def constant(self, value: Any) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name

    def name_of(self, expression: Expression) -> str:
        """The name of the variable with what ``expression`` gives; before it come those that it is computed from."""
        for each in _in_order(expression, self._names):
            self._kept.append(each)
            if isinstance(each, Always):
                self._names[id(each)] = self.constant(each.value)
                continue
            if isinstance(each, Apply):
                names = [self._names[id(operand)] for operand in each.operands]
                sign = _SIGNS.get(each.function)
                text = f" {sign} ".join(names) if sign else f"{self.constant(each.function)}({', '.join(names)})"
            else:
                text = f"n[{each.index}]" if isinstance(each, Nth) else f"{self.constant(each)}(n)"
            name = self._names[id(each)] = f"v{len(self._names)}"
            self.lines.append(f"{name} = {text}")
        return self._names[id(expression)]


def _in_order(expression: Expression, known: dict[int, str]) -> Iterator[Expression]:
    """It and what it is computed from, as far as that is not ``known``, each after its operands."""
    waiting = [(expression, False)]
    while waiting:
        each, is_open = waiting.pop()
        if id(each) in known:
            continue
        if is_open or not isinstance(each, Apply):
            yield each
        else:
            waiting.append((each, True))
            waiting += ((operand, False) for operand in reversed(each.operands))


def computes_the_same(one: Expression, other: Expression) -> bool:
    """Return whether two expressions, maybe of two traces, are the same function of the numbers."""
    waiting = [(one, other)]
    while waiting:
        one, other = waiting.pop()
        if one is other:
            continue
        if isinstance(one, Nth) and isinstance(other, Nth) and one.index == other.index:
            continue
        if isinstance(one, Always) and isinstance(other, Always) and one.value is other.value:
            continue
        if not (isinstance(one, Apply) and isinstance(other, Apply)) or one.function is not other.function:
            return False
        if len(one.operands) != len(other.operands):
            return False
        waiting += zip(one.operands, other.operands, strict=True)
    return True


def indices_in(expression: Expression) -> set[int]:
    """Return which numbers an expression reads."""
    waiting, found = [expression], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Apply):
            waiting += each.operands
        elif isinstance(each, Nth):
            found.add(each.index)
    return found


def text_of(expression: Expression, names: Sequence[str]) -> str:
    """An expression as people write it; of a long one the beginning, and a digest that tells it from others.

    Args:
        expression: What to show.
        names: Of the numbers.
    """
    known: dict[int, str] = {}
    for each in _in_order(expression, known):
        if isinstance(each, Nth):
            text = names[each.index]
        elif isinstance(each, Always):
            text = repr(each.value) if isinstance(each.value, int | float | str) else type(each.value).__name__
        elif isinstance(each, Apply):
            parts = [known[id(operand)] for operand in each.operands]
            sign = _SIGNS.get(each.function)
            name = getattr(each.function, "__name__", type(each.function).__name__)
            text = f"({f' {sign} '.join(parts)})" if sign else f"{name}({', '.join(parts)})"
        else:
            text = "…"
        if len(text) > MOST_TEXT:
            text = f"{text[: MOST_TEXT - 10]}…{zlib.crc32(text.encode()):08x}"
        known[id(each)] = text
    return known[id(expression)]


_SIGNS: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
"""Functions that a text has a shorter and quicker form for; of two operands."""
