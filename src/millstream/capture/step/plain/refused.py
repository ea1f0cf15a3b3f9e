"""Which calls of a step run as plain Python, without another look.

**Contract**
- A call is refused once for each key, and where the same line had the same reason twice for calls that differ in sizes
  alone, all of these are: a trace takes a hundred times as long as the step.
- Sizes that a graph serves show that the reason is one of some sizes only: then, and for calls that differ otherwise,
  the same reason at the same line must come up more often, and counts for all calls that no graph serves.
- Running as plain Python is always right; ``reset`` and an edited function are what makes the step try again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from millstream.capture.step.symbolic_sizes import form_without_sizes
from millstream.errors import CaptureError

MOST_ALIKE = 2
"""Refusals with the same reason and line of calls that differ in sizes, before they are not tried any more."""

MOST_ANYHOW = 4
"""The same of calls that differ in more, before none is."""


@dataclass
class Refused:
    """Calls that no graph serves."""

    keys: set[Any] = field(default_factory=set)
    kinds: set[Hashable] = field(default_factory=set)  # keys without sizes
    _alike: Counter[Any] = field(default_factory=Counter)
    _anyhow: Counter[Any] = field(default_factory=Counter)

    def covers(self, key: Any) -> bool:
        """Whether calls with this key are refused."""
        return key in self.keys or (bool(self.kinds) and form_without_sizes(key) in self.kinds)

    def add(self, key: Any, error: CaptureError, served: Iterable[Any]) -> bool:
        """Refuse calls with this key.

        Args:
            key: Of the call.
            error: Why.
            served: Keys of calls for which graphs were captured.

        Returns:
            Whether no call is to be tried any more.
        """
        self.keys.add(key)
        if isinstance(error.__cause__, torch.OutOfMemoryError):  # a matter of sizes
            return False
        kind, why = form_without_sizes(key), (error.reason, error.where)
        self._alike[kind, why] += 1
        self._anyhow[why] += 1
        if self._alike[kind, why] >= MOST_ALIKE and kind not in map(form_without_sizes, served):
            self.kinds.add(kind)
        return bool(error.where) and self._anyhow[why] >= MOST_ANYHOW
