"""Finalizers that Python's collector calls are no part of a step: what they belong to has died before, or elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident

from torch._C import DisableTorchFunction  # itself: a trace puts another in its place

from millstream._torch.tensors import real_tensors
from millstream.capture.effects.recorder import Recorder


@contextmanager
def finalizers_apart(recorder: Recorder) -> Iterator[None]:
    """For the length of the context, what the collector calls in this thread is done at once, with real tensors.

    It comes at any moment, in one trace and not in the next. A progress bar that nobody holds any longer closes itself,
    for example: that is done once, and not after each replay.
    """
    thread, apart = get_ident(), ExitStack()

    def note(phase: str, _: dict[str, int]) -> None:
        if get_ident() != thread:
            return
        if phase == "stop":
            apart.close()
        else:
            apart.enter_context(recorder.active(is_on=False))
            apart.enter_context(DisableTorchFunction())
            apart.enter_context(real_tensors())

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
