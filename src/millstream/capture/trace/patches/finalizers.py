"""Keep callbacks of Python's collector, and finalizers of objects from elsewhere, out of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident

from torch._C import DisableTorchFunction  # itself: a trace puts another in its place

from millstream._torch.tensors import real_tensors
from millstream.capture.record.interpreter.collector import around_collections
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder


@contextmanager
def finalizers_apart(recorder: EffectRecorder) -> Iterator[None]:
    """For the length of the context, what the collector calls in this thread is done at once, with real tensors.

    It comes at any moment, in one trace and not in the next. A progress bar that nobody holds any longer closes itself,
    for example: that is done once, and not after each replay.
    """
    apart = ExitStack()

    def starts() -> None:
        apart.enter_context(recorder.active(is_on=False))
        apart.enter_context(DisableTorchFunction())
        apart.enter_context(real_tensors())

    with around_collections(starts, apart.close, of_thread=get_ident()):
        yield
