"""How often calls may run as plain Python though no graph could be had, before that is given up."""

from __future__ import annotations

from collections import Counter
from typing import Any

from millstream.capture.step.plain.plain_runs import MAX_UNREADY
from millstream.capture.trace.request import EagerFirst, FirstChange, OneShot, StateMissing
from millstream.errors import CaptureError

MAX_ONE_SHOT = 4
"""Graphs that would serve one call only: so many calls run eagerly, such as the first steps of a warm-up."""

MAX_FIRST = 8
"""Calls that may run eagerly because the step sets a flag or the like for the first time, maybe the only time."""

MAX_MISSED = 3
"""Calls alike that may run eagerly because a cache has no answer: a step may ask it in the other way of a branch."""


class Patience:
    """Counts such calls of one step."""

    def __init__(self) -> None:
        self._num_one_shot = self._num_first = 0
        self._missed: Counter[Any] = Counter()

    def note_capture(self) -> None:
        """A graph could be had: caches have answers."""
        self._missed.clear()

    def is_lost(
        self, why: EagerFirst | StateMissing | FirstChange | OneShot, key: Any, num_unready: int
    ) -> CaptureError | None:
        """What to tell where another eager call leads nowhere; ``None`` where it may.

        Args:
            why: There is no graph now.
            key: Of the call.
            num_unready: Calls that ran eagerly so far to make state.
        """
        if isinstance(why, StateMissing):
            return _state_refusal(why) if num_unready == MAX_UNREADY or self._has_missed(key, why) else None
        if isinstance(why, FirstChange):
            self._num_first += 1
            return why.error if self._num_first > MAX_FIRST else None
        if isinstance(why, OneShot):
            self._num_one_shot += 1
            return one_shot_refusal(why) if self._num_one_shot > MAX_ONE_SHOT else None
        return None

    def _has_missed(self, key: Any, missing: StateMissing) -> bool:
        """Whether a cache has had no answer too often, though eager calls like this one have come in between."""
        if missing.where:
            self._missed[key, missing.name] += 1
        return self._missed[key, missing.name] >= MAX_MISSED


def one_shot_refusal(number: OneShot) -> CaptureError:
    """The refusal of a step that needs the very value of a number."""
    return CaptureError(
        f"The step depends on the very value of {number}, which it changes.",
        remedy="Compute with it by operators and functions of math, such as math.sqrt, or use a tensor.",
    )


def _state_refusal(missing: StateMissing) -> CaptureError:
    return CaptureError(
        f"The step creates new state ({missing.name}) again and again.",
        where=missing.where,
        remedy=(
            "Give every parameter a gradient in the first call, and caches room for all they are asked;"
            " call function.__wrapped__ where the step asks a cache in some calls only."
        ),
    )
