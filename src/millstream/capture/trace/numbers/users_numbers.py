"""The numbers that a step counts on: scalars of the graph are in their places while it is traced."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from millstream.capture.effects.expressions import (
    Nth,
)
from millstream.capture.effects.host_effects import COUNTING
from millstream.capture.record.location import Location
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.snapshot import StateSnapshot
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import GraphScalar, is_number, is_scalar
from millstream.capture.trace.request import Request
from millstream.errors import CaptureError
from millstream.heap import objects_of_types
from millstream.locks import TRACING


class UsersNumbers:
    """The numbers of a request.

    Args:
        request: Has them.
        questions: The graph's.

    Attributes:
        values: What they were, in their order.
        scalars: Those that stand for the user's own, by position.
        taken: Where another thread has put one in the place of one that the step counts on.
    """

    def __init__(self, request: Request, questions: Questions) -> None:
        self.values: list[Any] = []
        self.scalars: dict[int, GraphScalar] = {}
        self.taken: list[Location] = []
        self._request, self._questions = request, questions
        self._readers: dict[int, Callable[[], Any]] = {}
        self._left_alone: set[Location] = set()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Put graph scalars in the places of the numbers."""
        with TRACING.undoing(self._give_back):
            for index, number in enumerate(self._request.numbers):
                scalar = GraphScalar(0, Nth(index), self._questions, number.device, is_users=number.is_users)
                if number.is_users:
                    self.scalars[index] = scalar
                    self._readers[index] = number.location.reader()
                with COUNTING.lock:
                    scalar.value = number.location.get()  # and at once, as other threads may write there
                    if number.is_users and self._request.is_plain:
                        scalar.plain()
                    else:
                        number.location.set(scalar)
                self.values.append(scalar.value)
            yield

    def _give_back(self) -> None:
        for number, value in zip(self._request.numbers, self.values, strict=False):
            with COUNTING.lock:
                if is_scalar(number.location.get()):  # and not what another thread has put there
                    number.location.set(value)

    def take_from_others(self, snapshot: StateSnapshot) -> None:
        """Where another thread has put a number in the place of one that the step counts on, count on that one.

        Asked all the time: what the step adds to a plain number would be taken for the other thread's, too.
        """
        for index, read in self._readers.items():
            try:
                now = read()
            except (LookupError, ValueError):  # it is gone
                continue
            if type(now) is GraphScalar or not is_number(now):
                continue
            scalar, location = self.scalars[index], self._request.numbers[index].location
            if is_scalar(now) or location in self._left_alone:
                continue
            if any(change.location == location for change in snapshot.others()):
                with COUNTING.lock:
                    self.values[index] = scalar.value = location.get()
                    location.set(scalar)
                self.taken.append(location)
            else:
                self._left_alone.add(location)

    def write_down(self) -> None:
        """Let the graph depend on the user's numbers as they are."""
        for scalar in self.scalars.values():
            scalar.plain()


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
