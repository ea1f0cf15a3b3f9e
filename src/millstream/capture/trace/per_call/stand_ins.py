"""Objects that stand, while a step is traced, for those whose calls are recorded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from millstream.capture.record.location import Location
from millstream.locks import TRACING

_RECORDED = (vars(random), vars(np.random), vars(time))
"""Modules whose functions are recorded by themselves."""


class StandIns:
    """Puts other things in the places of some of the user's, and those back.

    Args:
        makers: Each gives what is to stand in the place of a value, by the name of the place; ``None`` for nothing.
    """

    def __init__(self, *makers: Callable[[str, Any], Any]) -> None:
        self._makers = makers
        self._put: list[tuple[Location, Any, Any]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """At the end of the context, put back what stood where."""
        with TRACING.undoing(self._put_back):
            yield

    def make(self, location: Location, value: Any) -> None:
        """Put what stands for a value where a step is about to find it, if anything does."""
        made = next((made for make in self._makers if (made := make(location.name, value)) is not None), None)
        if made is None or any(location.holder is each for each in _RECORDED) or location.get() is not value:
            return
        with suppress(TypeError, AttributeError):  # it cannot be written
            location.set(made)
            self._put.append((location, value, made))

    def _put_back(self) -> None:
        for location, value, made in self._put:
            if location.get() is made:
                location.set(value)
