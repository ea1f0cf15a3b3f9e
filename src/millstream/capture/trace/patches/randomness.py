"""Random numbers that do not come from operators of the graph: noticed, refused, and put back."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from millstream._torch.one_thread import attributes_here
from millstream.capture.effects.host_generators import set_state, state_of
from millstream.capture.lines import raise_refusal
from millstream.capture.trace.per_call.draws import REMEDY, Draws


class RandomState:
    """The states of PyTorch's, Python's and NumPy's random generators, to compare with and to go back to."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[str, Any, Any]] = {}
        self._is_alone = threading.active_count() == 1
        self._host = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def add(self, name: str, generator: Any) -> None:
        """Note another one, as it is now."""
        if id(generator) not in self._own:
            with contextlib.suppress(NotImplementedError):  # the system's has no state
                self._own[id(generator)] = name, generator, state_of(generator)

    def what_changed(self) -> str:
        """Name a generator that was used since; empty if none was, or if another thread may have used it."""
        for name, generator, state in self._own.values():
            if pickle.dumps(state_of(generator)) != pickle.dumps(state):
                return f"{name}, a random generator"
        if not self._is_alone or threading.active_count() > 1:
            return ""
        if random.getstate() != self._python:
            return "Python's random module"
        if any(not np.array_equal(a, b) for a, b in zip(self._numpy, np.random.get_state(), strict=True)):
            return "NumPy's random module"
        return "" if torch.equal(torch.get_rng_state(), self._host) else "a generator outside of the graph"

    def restore(self) -> None:
        """Go back to the state at creation."""
        for _, generator, state in self._own.values():
            set_state(generator, state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._host)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)


@contextlib.contextmanager
def draws_recorded(draws: Draws, refuse: Callable[[Exception], None]) -> Iterator[None]:
    """For the length of the context, on this thread, what ``random`` and ``numpy.random`` draw is recorded.

    New seeds and states raise.
    """
    seed, state = _refusing("sets a seed", refuse), _refusing("sets a state of random numbers", refuse)
    set_state = _but_for_checkpoints(state, torch.set_rng_state)

    def methods(module: ModuleType, kind: type) -> dict[str, Any]:
        return {
            name: draws.method(value.__self__, value.__name__, f"{module.__name__}.{name}")
            for name, value in vars(module).items()
            if isinstance(getattr(value, "__self__", None), kind)
        }

    fork = _but_for_checkpoints(state, torch.random.fork_rng)
    with (
        attributes_here(torch, manual_seed=seed, seed=seed, set_rng_state=set_state),
        attributes_here(torch.random, manual_seed=seed, seed=seed, set_rng_state=set_state, fork_rng=fork),
        attributes_here(torch.cuda, manual_seed=seed, manual_seed_all=seed),
        attributes_here(random, **methods(random, random.Random)),
        attributes_here(np.random, **methods(np.random, np.random.RandomState)),
    ):
        yield


def _but_for_checkpoints(refusal: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what activation checkpointing may call, whose random numbers are used again otherwise, and nobody else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (original if caller in _CHECKPOINTING else refusal)(*args, **kwargs)

    return call


_CHECKPOINTING = ("torch.utils.checkpoint", "torch.random")


def _refusing(what: str, refuse: Callable[[Exception], None]) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise_refusal(
            refuse,
            f"The step {what}, which a graph would not do again.",
            REMEDY,
        )

    return call
