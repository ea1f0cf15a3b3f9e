"""``feed``: batches cross to the device while it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, cast

import torch

from millstream.device import Place, context
from millstream.errors import ArgumentError, FeedError
from millstream.feed.copy_lane import CopyLane
from millstream.feed.lane import HostLane, Lane
from millstream.feed.session import Session


def feed(loader: Iterable[Any], device: str | torch.device | Place, depth: int = 2) -> Feed:
    """Iterate over the batches of ``loader``, with their tensors on ``device``.

    A worker thread pulls batches ahead, stages their tensors in pinned memory and copies them on a stream of their own,
    so that the next batches cross while the device computes with the present one::

        for x, y in ms.feed(loader, "cuda"):
            train_step(x, y)

    **What arrives.** Batches in the loader's order. Tensors in tuples, lists, dicts, named tuples, dataclasses and
    packed sequences are moved; everything else stays as it is. Each batch is the user's own and may be kept: no later
    batch overwrites it. It belongs to the stream that is current when it is asked for, and may be used there without
    synchronising; the host never waits for the device. On the CPU the loader's own objects arrive.

    **The loader.** Anything that can be iterated, several times if it can. Its iterator is made in the thread that
    begins to iterate and then used in the worker thread only. At most ``depth + 1`` batches are pulled ahead, so a
    loader that is an iterator itself has advanced by as much when the loop is left early. A loader that yields the same
    tensors again with new content is safe with a GPU; on the CPU, where nothing is copied, it must yield new ones.
    Random numbers that the loader draws in this process come from the same global generator that the training loop
    uses, at times that vary: give it a generator of its own, or worker processes, where runs must repeat exactly.

    **Endings.** An error of the loader is raised where its batch would have come, with its traceback, after all batches
    before it. Leaving the loop in any way (``break``, an exception, Ctrl-C) ends the worker; ``close`` and ``with`` do
    so explicitly.

    Args:
        loader: Yields batches.
        device: Where they go.
        depth: How many batches may be under way, at least 1. Device memory for up to ``depth`` batches is taken beyond
            those in use.

    Raises:
        ArgumentError: ``depth`` is not a positive integer, or ``loader`` cannot be iterated.
        DeviceError: The device does not exist.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ArgumentError(
            f"depth is {depth!r}; it must be an integer of at least 1, the number of batches that may be under way."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentError(
            f"The loader is a {type(loader).__name__}, which cannot be iterated; expected a DataLoader, "
            "a list, a generator or the like."
        )
    return Feed(loader, Place.of(device), depth)


class Feed:
    """Device batches of a loader; see ``feed``, which makes it.

    Every ``iter`` begins a new pass over the loader. There is one pass at a time: a new one ends the last, because two
    threads must not pull from one loader.

    Attributes:
        loader: Where batches come from.
        place: Where they go.
        depth: How many may be under way.
    """

    def __init__(self, loader: Iterable[Any], place: Place, depth: int) -> None:
        self.loader = loader
        self.place = place
        self.depth = depth
        self._closed = False
        # Weak: a loop that is left drops the pass, and with it must go the worker, although the feed lives on.
        self._last: weakref.ref[Session] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass.

        Raises:
            FeedError: The feed is closed.
        """
        if self._closed:
            raise FeedError("The feed is closed; make a new one with millstream.feed.")
        self._end_last("the feed has been iterated anew, and there is one pass at a time")
        iterator = iter(self.loader)
        device = context(self.place)
        lane: Lane[Any] = HostLane() if self.place.kind == "cpu" else CopyLane(device, self.depth)
        begun = _Pass(Session(iterator, lane, self.depth))
        device.attach(begun.session)
        self._last = weakref.ref(begun.session)
        del iterator  # the worker's alone
        begun.session.begin()
        return begun

    def __len__(self) -> int:
        """Number of batches, if the loader knows it."""
        return len(cast("Sized", self.loader))

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the present pass, if there is one: no thread and no memory of it remain. Closing again does nothing.

        A worker that is inside the loader at this moment is waited for, but not for ever: if the loader takes long, the
        worker ends when the loader returns.
        """
        self._closed = True
        self._end_last("")

    def _end_last(self, why: str) -> None:
        session = self._last() if self._last is not None else None
        if session is not None:
            session.close(why)
            if why:
                session.wait_for_worker()  # two threads must never pull from one loader
        self._last = None

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Feed of {type(self.loader).__name__} to {self.place}, depth {self.depth}{state}>"


class _Pass(Iterator[Any]):
    """The iterator that a loop holds. When the loop drops it, the session ends."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # The session must not refer back to this object, or leaving a loop would not end the worker. Nor does the
        # thread.
        finalizer = weakref.finalize(self, session.close, "")
        # The end of the interpreter is the device context's to order.
        finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def __next__(self) -> Any:
        try:
            return self.session.next_batch()
        finally:
            del self  # as in ``next_batch``: an error's traceback must not lead back to the error
