"""``ms.callback``: Python's own work from within a captured step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from millstream.capture.trace.recorded_effects.effect_recorder import open_structure, recorder_of_thread
from millstream.errors import ArgumentError
from millstream.locks import released
from millstream.results import fetch
from millstream.tree.spec import tree_unflatten


def callback(fn: Callable[..., object], *args: Any, sync: bool = True) -> None:
    """Call ``fn(*args)`` from a step, also when a graph runs in its place.

    ::

        @ms.step
        def train_step(x, y):
            ...
            ms.callback(history.append, loss.item())

    A captured step calls it after its graph, on the caller's thread, before the step returns; in the order of the
    program with everything else that the step prints, logs and counts; once per call of the step, never while the step
    is traced. Elsewhere it calls ``fn`` at once.

    Args:
        fn: What to call; what it returns is dropped. The object of a bound method may change between calls as it
            likes, if the step does not read it otherwise.
        args: Tensors come detached, with the values that they have at this point of the step; what ``.item()`` gives
            comes as a number. Other objects come as they are when ``fn`` is called.
        sync: Whether to call it before the step returns. To read a tensor then, ``fn`` waits for the device. Otherwise
            tensors are brought to the host as ``ms.fetch`` does it, those without dimensions as numbers, and ``fn`` is
            called with them later, in order, in another thread if they come from a device; what it raises is logged.

    Raises:
        ArgumentError: ``fn`` cannot be called.
    """
    if not callable(fn):
        raise ArgumentError(f"callback() takes a function and its arguments; {fn!r} cannot be called.")
    call = fn if sync else functools.partial(_deliver, fn)
    recorder = recorder_of_thread()
    if recorder is not None:
        recorder.call(call, *args)
        return
    leaves: list[Tensor] = []
    structure = open_structure(args, leaves, parameters=True)
    with released():  # in a step that runs as plain Python
        call(*tree_unflatten(structure, [leaf.detach() for leaf in leaves]))


def _deliver(fn: Callable[..., object], *args: Any) -> None:
    fetch(args, callback=lambda values: fn(*values))
