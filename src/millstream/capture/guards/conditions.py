"""Conditions of one kind, such as entries of dicts or code of functions, that a graph's guards compare all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import contains, eq, getitem, is_
from types import FunctionType
from typing import Any

from torch import Tensor

from millstream.capture.lines import is_millstreams
from millstream.capture.record.location import MISSING, Items, Location, looked_into
from millstream.capture.state.signature import is_same


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that no longer holds."""

    reason: str  # in a sentence
    location: Location | None = None  # what changed, if that is an entry
    is_final: bool = False  # whether it will not hold again: state was replaced
    before: Any = MISSING  # what the entry held
    now: Any = MISSING  # and holds

    @property
    def is_tensor(self) -> bool:
        """Whether the entry held a tensor."""
        return isinstance(self.before, Tensor)


@dataclass(slots=True)
class Check:
    """Conditions of one kind: what is read of each of some things passes a test, together with what was read first.

    The loop over them has no code of ours in it, where neither ``read`` nor ``test`` has.
    """

    reason: str  # what is wrong with one, with a place for its name
    read: Callable[[Any], Any]
    test: Callable[[Any, Any], Any] = eq
    things: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)  # of the things; or the locations of entries

    def add(self, thing: Any, name: Any = "", value: Any = MISSING) -> None:
        """Expect of ``thing`` what can be read of it now, or ``value``."""
        self.things.append(thing)
        self.names.append(name)
        self.values.append(self.read(thing) if value is MISSING else value)

    def now(self) -> Iterator[Any]:
        """Return what is read now."""
        return map(self.read, self.things)

    def holds(self) -> bool:
        """Return whether all of them hold."""
        if self.test is eq:
            return [*self.now()] == self.values
        if self.test is not is_same:
            return all(map(self.test, self.now(), self.values))
        now = [*self.now()]
        if not all(map(is_, now, self.values)):
            if not all(map(is_same, now, self.values)):
                return False
            self.values = now  # equal ones, with which the next call compares
        return True

    def broken(self) -> Iterator[Break]:
        """Yield those that don't."""
        for thing, name, value in zip(self.things, self.names, self.values, strict=True):
            now = MISSING
            with contextlib.suppress(KeyError, IndexError, ValueError, RuntimeError):
                now = self.read(thing)
                if self.test(now, value):
                    continue
            location = name if isinstance(name, Location) else None
            values = (value, now) if self.reason is ANOTHER else ()
            yield Break(self.reason.format(name), location, False, *values)


class Entries(Check):
    """Entries of dicts, lists and the like; the things are pairs of holder and key."""

    def __init__(
        self, test: Callable[[Any, Any], Any] = is_same, read: Callable[[Any], Any] = lambda pair: getitem(*pair)
    ) -> None:
        super().__init__(ANOTHER, read, test)

    def now(self) -> Iterator[Any]:
        return starmap(getitem, self.things)

    def expect(self, location: Location, value: Any) -> None:
        """Expect ``value`` at a location."""
        self.add((looked_into(location.holder), location.key), location, value)

    def triples(self) -> Iterator[tuple[Any, Any, Any]]:
        """Holders, keys and values; of a dict with methods of its own the dict, as compiled code looks past these."""
        for (holder, key), value in zip(self.things, self.values, strict=True):
            yield holder.owner if isinstance(holder, Items) else holder, key, value


class BorrowedEntries(Entries):
    """Entries of PyTorch and Python's library. Each may be absent; a wrapper of ours stands for what it wraps."""

    def __init__(self) -> None:
        super().__init__(_is_same_original, lambda place: dict.get(*place))

    def expect(self, location: Location, value: Any) -> None:
        self.add((location.holder, location.key, MISSING), location, value)

    def now(self) -> Iterator[Any]:
        return starmap(dict.get, self.things)

    def holds(self) -> bool:
        return all(map(is_, self.now(), self.values)) or all(map(self.test, self.now(), self.values))

    def triples(self) -> Iterator[tuple[Any, Any, Any]]:
        return ((holder, key, value) for (holder, key, _), value in zip(self.things, self.values, strict=True))


class AbsentEntries(Entries):
    """Entries of a namespace that must not be there."""

    def __init__(self) -> None:
        super().__init__(is_, lambda pair: contains(*pair))

    def holds(self) -> bool:
        return not any(starmap(contains, self.things))

    def broken(self) -> Iterator[Break]:
        for change in super().broken():
            yield replace(change, before=MISSING, now=change.location.get() if change.location else MISSING)


ANOTHER = "{} is another than before."


def original_of(value: Any) -> Any:
    """Return what stands in a place where Millstream may have put a wrapper for a while.

    ``MISSING`` if that was nothing.
    """
    while isinstance(function := getattr(value, "__func__", value), FunctionType):
        if not is_millstreams(function.__code__.co_filename):
            break
        value = vars(function).get("__wrapped__", MISSING)
    return value


def _is_same_original(now: Any, value: Any) -> bool:
    return is_same(original_of(now), value) or (value is MISSING and original_of(now) is not now)
