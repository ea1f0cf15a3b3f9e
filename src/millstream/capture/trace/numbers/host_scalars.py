"""Numbers that the host reads from a graph's results: nobody knows their values while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.expressions import (
    Expression,
)
from millstream.capture.effects.late_values import Later, Leaf
from millstream.capture.lines import here
from millstream.capture.record.location import MISSING
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import GraphScalar, is_scalar
from millstream.capture.trace.numbers.whole_numbers import INT64, Bounds, is_within
from millstream.errors import CaptureError


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
