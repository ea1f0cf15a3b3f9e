"""Values that are known on the host only after a replay, as expressions, and text with places for them.

While tracing, a number read from a tensor has no value. Text made from it holds a *token* where the value will stand; a
``Template`` is such text, taken apart at its tokens. Nothing here touches a device or PyTorch.

**Contract**
- An expression is a function of ``Values`` alone: it gives the same for the same values.
- Text that was changed as a function of the tokens' characters (cut, padded, compared by length) is either refused or
  gives another template under the other style.
- Text that is made and comes up nowhere has decided something, as a key or in a comparison: see ``Texts.unshown``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

from millstream.capture.effects.expressions import Expression


class Values:
    """Values that expressions read after a replay.

    Args:
        numbers: Numbers that the graph read.
        tensors: Its results.
        stacks: Which of the results hold numbers that the host reads, in order.
        readings: Of clocks, in order.
        times: What clocks gave that were read before the graph ran, by the index of the reading.
    """

    def __init__(
        self,
        numbers: Sequence[Any],
        tensors: Sequence[Any],
        stacks: Sequence[int],
        readings: Sequence[Reading] = (),
        times: dict[int, Any] | None = None,
    ) -> None:
        self._numbers = numbers
        self._stacks = stacks
        self._items: list[Any] | None = None
        self._kept: set[int] = set()
        self.tensors = tensors
        self.returned: dict[int, Any] = {}
        self._shared: dict[SharedValue, Any] = {}
        self._readings = readings
        self._times = times or {}

    def __getitem__(self, index: int) -> Any:
        return self._numbers[index]

    def renew(self, index: int, now: Any, allow: Callable[[Sequence[Any]], bool]) -> bool:
        """From here on read the number that is there by now, if it is another and ``allow`` finds it fine."""
        if index in self._kept or now == self._numbers[index] or now != now:
            return False
        if not isinstance(now, Real) or isinstance(now, bool):
            return False
        numbers = [*self._numbers[:index], now, *self._numbers[index + 1 :]]
        if not allow(numbers):
            return False
        self._numbers = numbers
        return True

    def keep(self, index: int) -> None:
        """Go on reading that number as it was when the call began, whatever is there by now."""
        self._kept.add(index)

    def item(self, index: int) -> Any:
        """A number from a tensor. The first one waits for the device, and brings all."""
        if self._items is None:
            self._items = [value for stack in self._stacks for value in self.tensors[stack].tolist()]
        return self._items[index]

    def share(self, shared: SharedValue) -> Any:
        """Return what an expression gives, the same object each time."""
        if shared not in self._shared:
            self._shared[shared] = shared.of(self)
        return self._shared[shared]

    def time(self, index: int) -> Any:
        """Return what a clock gave; the first one that is read after the graph has all read that are, in order."""
        if index not in self._times:
            self._times = read_clocks(self._readings, is_early=False) | self._times
        return self._times[index]


@dataclass(slots=True, eq=False)
class Reading:
    """The reading of a clock, once a call."""

    clock: Callable[[], Any]
    index: int
    is_early: bool = False  # whether it is read before the graph runs

    def __call__(self, values: Any) -> Any:
        return values.time(self.index)


def read_clocks(readings: Sequence[Reading], *, is_early: bool) -> dict[int, Any]:
    """Return what clocks give that are read before the graph runs, or after it, by the index of the reading."""
    return {reading.index: reading.clock() for reading in readings if reading.is_early is is_early}


@dataclass(slots=True, eq=False)
class LateItem:
    """A number in a tensor; its index is given when all that are needed are known."""

    index: int = -1

    def __call__(self, values: Any) -> Any:
        return values.item(self.index)


@dataclass(slots=True, eq=False)
class Whole:
    """A tensor among the graph's results; its index is given like that of an ``LateItem``."""

    index: int = -1

    def __call__(self, values: Any) -> Any:
        return values.tensors[self.index]


@dataclass(slots=True, eq=False)
class Returned:
    """Part of what a call in the list of effects has returned."""

    call: int
    part: int

    def __call__(self, values: Any) -> Any:
        return values.returned[self.call][self.part]


@dataclass(slots=True, eq=False)
class SharedValue:
    """What an expression gives, which is computed once a call: an array is one object, wherever it goes."""

    of: Expression

    def __call__(self, values: Any) -> Any:
        return values.share(self)


class Later:
    """Base of what stands for a number or an array that is known after a replay."""

    of: Expression
    needs: frozenset[Leaf]

    def scalar(self) -> Any:
        """It as what stands for numbers, if it is one; itself otherwise."""
        return self


Leaf: TypeAlias = LateItem | Whole
"""What brings a tensor's values into an expression."""


@dataclass(frozen=True, slots=True)
class Template:
    """Text with places for values."""

    parts: tuple[str | Expression, ...]  # text, and expressions that give text
    needs: frozenset[Leaf]  # what the expressions read

    def __call__(self, values: Any) -> str:
        return "".join(part if isinstance(part, str) else part(values) for part in self.parts)


_START, _END = "\U0010f0f0", "\U0010f0f1"
"""Characters for private use, which nobody else is likely to have in a text."""

_FIRST, _MOST = 0x10F100, 0xE00
"""Others, each of which is a token of the first style; icons of fonts stand far below."""

_BEFORE, _AFTER = f"  {_START}nan -inf,1.5E+00\t|{'w' * 40} vX", f"{_END} "
"""What stands around the number of a token of the second style.

Tokens of the first are as short as can be, so that text is padded, those of the second long, so that it is cut: text
computed alike from both depends on neither.
"""

_SHORT = re.compile(f"([{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}])")
_LONG = re.compile(f"{re.escape(_BEFORE)}([0-9]+){re.escape(_AFTER)}")
_SHOWN = re.compile(f"{_LONG.pattern}|{_SHORT.pattern}|\\\\U00(10f[1-9a-e][0-9a-f]{{2}})")  # the last is of ``repr``
_ANY = re.compile(f"[{_START}{_END}{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}]")


class TextChanged(Exception):  # noqa: N818 - a message to the tracer, which knows the line
    """A token was cut or changed: the text depends on the characters of a value that is not known yet."""


@dataclass
class Texts:
    """The tokens of one trace."""

    style: int = 0  # 0 or 1
    # for each token the expression of its text, what that reads, and the line that has made it
    made: list[tuple[Expression, frozenset[Leaf], str]] = field(default_factory=list)
    shown: set[int] = field(default_factory=set)  # tokens that text of an effect or a result has had

    def token(self, of: Expression, needs: frozenset[Leaf], where: str) -> str:
        """Text that stands for what ``of`` will give.

        Raises:
            TextChanged: There are too many.
        """
        number = len(self.made)
        if number == _MOST:
            raise TextChanged
        self.made.append((of, needs, where))
        return f"{_BEFORE}{number}{_AFTER}" if self.style else chr(_FIRST + number)

    def template(self, text: str) -> Template:
        """Take a text apart at its tokens.

        Raises:
            TextChanged: One of them is no longer what it was.
        """
        pieces = self.outline(text)
        if any(isinstance(piece, str) and holds_token(piece) for piece in pieces):
            raise TextChanged
        numbers = pieces[1::2]
        if any(number >= len(self.made) for number in numbers):  # a character of the user's own
            raise TextChanged
        self.shown.update(numbers)
        parts = [self.made[piece][0] if index % 2 else piece for index, piece in enumerate(pieces)]
        needs = frozenset[Leaf]().union(*(self.made[number][1] for number in numbers))
        return Template(tuple(part for part in parts if part != ""), needs)

    def outline(self, text: str) -> tuple[Any, ...]:
        """The text's parts, with tokens by their numbers: equal under both styles where nothing depends on them."""
        pieces = (_LONG if self.style else _SHORT).split(text)
        return tuple(self._number(piece) if index % 2 else piece for index, piece in enumerate(pieces))

    def unshown(self) -> str | None:
        """The line of the first token that came up in no effect and no result, if there is one."""
        return next((where for number, (_, _, where) in enumerate(self.made) if number not in self.shown), None)

    def readable(self, text: str, numbers: Any) -> str:
        """The same for messages: a token is what it stands for, or an ellipsis if that is known after the step."""

        def show(token: re.Match[str]) -> str:
            number = int(token[1]) if token[1] else ord(token[2] or chr(int(token[3], 16))) - _FIRST
            of, needs, _ = self.made[number] if number < len(self.made) else (None, frozenset(), "")
            try:
                return "…" if of is None or needs else of(numbers)
            except AttributeError:  # of what a call returns
                return "…"

        return _SHOWN.sub(show, text)

    def _number(self, piece: str) -> int:
        return int(piece) if self.style else ord(piece) - _FIRST


def holds_token(text: str) -> bool:
    """Return whether there is a token in a text, or what is left of one."""
    return _ANY.search(text) is not None
