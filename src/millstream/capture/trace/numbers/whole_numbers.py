"""Which whole numbers a graph can read, and which are floats without rounding."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

MOST_EXACT = 2**53
"""Whole numbers up to this size are floats without rounding."""

INT64 = -(2**63), 2**63 - 1
"""The least and the greatest whole number that a graph reads."""

USUAL = -(2**31), 2**31
"""Between these are counts and sizes as a rule."""

Bounds: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Between which numbers a whole one is in any case, and as a rule."""


def is_within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Return whether whole numbers between the bounds of ``inner`` are between those of ``outer``."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def fits_int64(number: Any) -> bool:
    """Return whether it is a whole number that a graph can read."""
    kind = type(number)
    return (kind is int or issubclass(kind, np.integer)) and INT64[0] <= number <= INT64[1]


def is_double(number: Any) -> bool:
    """Return whether Python computes with it in double precision."""
    return type(number) in (float, np.float64)
