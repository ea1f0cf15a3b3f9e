"""Several GPUs beside one, on the inputs of a call: whether they compute the same, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import Any

import torch

from millstream.device import DeviceContext
from millstream.engine.engine import Engine
from millstream.engine.unchanged import bits_of, unchanged, written
from millstream.lower import Lowered

SAMPLES, CALLS = 7, 5
"""Pairs of timings, and calls in each."""
REPEATS, FARTHER = 2, 4.0
"""How often one device runs again where several give other bits, and how much farther than that they may be off."""


def distance(found: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> float:
    """The largest distance of a tensor from another, in lengths of that; 0 where all bits are equal.

    Where other numbers than those with a fraction differ, or one is not finite, it is infinite.
    """
    most = 0.0
    for one, other in zip(found, base, strict=True):
        if torch.equal(bits_of(one), bits_of(other)):
            continue
        if not one.is_floating_point():
            return inf
        length = max(float(other.double().norm()), torch.finfo(other.dtype).tiny)
        far = float((one.double() - other.double()).norm()) / length
        most = max(most, far) if far < inf else inf
    return most


class PlacedTrial:
    """Compares runners with one device on the inputs of a call, which find everything as it was.

    Args:
        lowered: What is run.
        one: On one device.
        inputs: Of the call.
        home: Of the user's device.
    """

    def __init__(self, lowered: Lowered, one: Engine, inputs: Sequence[Any], home: DeviceContext) -> None:
        self._one, self._inputs, self._home, self._program = one, inputs, home, lowered.program
        self._changed = written(lowered.program, inputs)
        self._generator = torch.cuda.default_generators[home.place.index]
        self._base: list[torch.Tensor] | None = None  # what one device gives
        self._spread: float | None = None  # how far it is from itself the next time, once that was asked for

    @property
    def varies(self) -> bool:
        """Whether one device has given other numbers the next time, as far as that was asked for."""
        return bool(self._spread)

    def check(self, runner: Callable[[list[Any]], list[Any]]) -> str:
        """Say what is wrong with what it computes; empty where nothing is.

        That is the bits of one device; or if that varies itself, numbers not much farther from it than its own are.
        """
        if self._base is None:
            self._base = self._run(self._one)
        found = self._run(runner)
        if distance(found, self._base) == 0.0:
            return ""
        if self._spread is None:
            self._spread = max(distance(self._run(self._one), self._base) for _ in range(REPEATS))
        return "" if distance(found, self._base) <= FARTHER * self._spread else "rounds otherwise"

    def _run(self, run: Callable[[list[Any]], list[Any]]) -> list[torch.Tensor]:
        with unchanged(self._program, self._changed, self._generator):
            results = (*run(list(self._inputs)), *self._changed)
            return [value.detach().clone() for value in results if isinstance(value, torch.Tensor)]

    def time(self, runner: Callable[[list[Any]], list[Any]]) -> tuple[int, int]:
        """Return how long a call takes, and how long on one device, in ns."""
        with unchanged(self._program, self._changed, self._generator) as rewind:
            pairs = [(self._time(runner, rewind), self._time(self._one, rewind)) for _ in range(SAMPLES)]
        own_ns, one_ns = (round(median(times)) for times in zip(*pairs, strict=True))
        return own_ns, one_ns

    def _time(self, run: Callable[[list[Any]], list[Any]], rewind: Callable[[], None]) -> float:
        self._home.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            rewind()
            run(list(self._inputs))
        self._home.synchronize()
        return (time.perf_counter_ns() - start) / CALLS
