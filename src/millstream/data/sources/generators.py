"""States of random generators, the three global ones and a loader's own, and who advances them."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from millstream._torch.loading import find_loader
from millstream.errors import warn_user

_logger = logging.getLogger(__name__)

Moved = Sequence[str]
"""Names of generators that are not where they were."""


class GeneratorSnapshot:
    """The states of generators at one moment."""

    __slots__ = ("_states",)

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    @staticmethod
    def take(own: Sequence[torch.Generator] = ()) -> GeneratorSnapshot:
        """Look at the global generators, and at some others."""
        states: dict[str, Any] = {"torch": torch.default_generator.get_state(), "random": random.getstate()}
        if "numpy.random" in sys.modules:
            states["numpy"] = np.random.get_state(legacy=False)
        states |= {f"own {i}": generator.get_state() for i, generator in enumerate(own)}
        return GeneratorSnapshot(states)

    def moved(self, later: GeneratorSnapshot) -> Moved:
        """Return those that stand elsewhere at a later moment."""
        return [name for name, state in self._states.items() if not _same(state, later._states.get(name, state))]

    def restore(self, own: Sequence[torch.Generator] = ()) -> None:
        """Put them back."""
        for name, state in self._states.items():
            if name == "torch":
                torch.default_generator.set_state(state)
            elif name == "random":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(state)
            elif (number := int(name.removeprefix("own "))) < len(own):
                own[number].set_state(state)

    def dump_moved(self, later: GeneratorSnapshot) -> dict[str, Any] | None:
        """Return those that have moved until later, as plain data; ``None`` if there are none."""
        return {name: _dump(self._states[name]) for name in self.moved(later)} or None

    def digest(self, names: Iterable[str]) -> str:
        """A number of some of them, by which two moments can be compared."""
        states = {name: _dump(self._states.get(name)) for name in sorted(names)}
        return hashlib.sha256(json.dumps(states).encode()).hexdigest()

    @staticmethod
    def load(data: dict[str, Any]) -> GeneratorSnapshot:
        """From plain data."""
        return GeneratorSnapshot({name: _load(name, state) for name, state in data.items()})


class DrawWatch:
    """Notices a source that draws from global generators, which then must not be read ahead.

    Attributes:
        in_step: Whether it was found to draw: from now on it is asked only while the loop waits.
        name: Of the generators.
        next_due: The next pull that is to be looked at.
    """

    NUM_CHECKED, INTERVAL = 16, 64  # the first pulls that are looked at, and then every so many

    def __init__(self) -> None:
        self.in_step = False
        self.name = ""  # of the generators
        self._suspect: int | None = None  # the first pull during which one has moved
        self.next_due: float = 1  # pull to be looked at

    def begin_pass(self, *, may_draw: bool) -> DrawWatch:
        """A new pass: the second pull is looked at again, unless the source cannot draw or is known to."""
        self._suspect, self.next_due = None, 1 if may_draw and not self.in_step else math.inf
        return self

    @property
    def wants_step(self) -> bool:
        """Whether the next pull has to wait for the loop, to tell whose draws these are."""
        return self.in_step or self._suspect is not None

    def look(self, number: int, moved: Moved, *, waited: bool) -> None:
        """Take in what pull ``number`` has moved; tell the user once if the source is thereby found to draw.

        Args:
            number: Of the pull.
            moved: Generators that are not where they were before.
            waited: Whether the loop was waiting all the time, so that nobody else has drawn.
        """
        suspect, self._suspect = self._suspect, None
        self.next_due = number + (1 if number < self.NUM_CHECKED else self.INTERVAL)
        if moved and waited:
            self.in_step, self.name, self.next_due = True, " and ".join(moved), math.inf
            _tell(self.name, number if suspect is None else suspect)
        elif moved:
            self._suspect = number
            self.next_due = number + 1
        elif suspect is not None:
            self.next_due = 2 * number  # the loop draws: it would be asked to wait again and again


def _tell(generators: str, number: int) -> None:
    """Tell the user once that a source draws random numbers in this process."""
    if number == 1:
        _logger.warning(
            "The loader draws from the generator of %s, as the loop may: so it is asked only when the loop waits for a "
            "batch, and nothing is read ahead. A DataLoader with num_workers, or generators of its own, is.",
            generators,
        )
        return
    warn_user(
        f"The loader has begun to draw from the generator of {generators} at batch {number}, while it was read ahead: "
        "until then its draws and those of the loop came in an order that depends on timing. From now on it is asked "
        "only when the loop waits for a batch. Give the DataLoader workers, or generators of its own."
    )


def find_own(source: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers were given; or a source, and a DataLoader in it."""
    loader = source if (inner := find_loader(source)) is None else inner
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = (source, loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return [each for each in unique.values() if each is not torch.default_generator]


def is_snapshot(data: Any) -> bool:
    """Return whether this is what ``dump_moved`` gives."""
    if data is None:
        return True
    try:
        GeneratorSnapshot.load(data)
    except Exception:  # noqa: BLE001 - whatever somebody has made of it
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _dump(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return base64.b64encode(state.numpy().tobytes()).decode()
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "values": state.tolist()}
    if isinstance(state, dict):
        return {key: _dump(value) for key, value in state.items()}
    return [list(each) if isinstance(each, tuple) else each for each in state] if isinstance(state, tuple) else state


def _load(name: str, state: Any) -> Any:
    if name == "random":
        version, words, gauss = state
        return version, tuple(words), gauss
    if name == "numpy":
        return _load_numpy(state)
    if name != "torch":
        int(name.removeprefix("own "))
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


def _load_numpy(state: Any) -> Any:
    if isinstance(state, dict) and state.keys() == {"dtype", "values"}:
        return np.array(state["values"], dtype=state["dtype"])
    return {key: _load_numpy(value) for key, value in state.items()} if isinstance(state, dict) else state
