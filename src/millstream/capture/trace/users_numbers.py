"""The numbers that a step counts on: scalars of the graph are in their places while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from millstream.capture.effects.expressions import Nth
from millstream.capture.effects.host_effects import COUNTING
from millstream.capture.record.location import Location
from millstream.capture.state.snapshot import StateSnapshot
from millstream.capture.trace.numbers.scalars import GraphScalar, Questions, is_number, is_scalar
from millstream.capture.trace.request import Request
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
