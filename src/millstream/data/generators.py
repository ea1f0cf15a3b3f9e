"""Where random generators stand: the three global ones, and those that a loader has of its own."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Moved = Sequence[str]
"""Names of generators that are not where they were."""


class Snapshot:
    """Where generators stand at one moment."""

    __slots__ = ("_states",)

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    @staticmethod
    def take(own: Sequence[torch.Generator] = ()) -> Snapshot:
        """Look at the global generators, and at some others."""
        states: dict[str, Any] = {"torch": torch.default_generator.get_state(), "random": random.getstate()}
        if "numpy.random" in sys.modules:
            states["numpy"] = np.random.get_state(legacy=False)
        states |= {f"own {i}": generator.get_state() for i, generator in enumerate(own)}
        return Snapshot(states)

    def moved(self, later: Snapshot) -> Moved:
        """Those that stand elsewhere at a later moment."""
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

    def dump_moved(self, later: Snapshot) -> dict[str, Any] | None:
        """Those that have moved until later, as plain data; ``None`` if there are none."""
        return {name: _dump(self._states[name]) for name in self.moved(later)} or None

    @staticmethod
    def load(data: dict[str, Any]) -> Snapshot:
        """From plain data."""
        return Snapshot({name: _load(name, state) for name, state in data.items()})


def find_own(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers were given."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return [each for each in unique.values() if each is not torch.default_generator]


def is_snapshot(data: Any) -> bool:
    """Whether this is what ``dump_moved`` gives."""
    if data is None:
        return True
    try:
        Snapshot.load(data)
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
