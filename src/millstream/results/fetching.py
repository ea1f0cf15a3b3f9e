"""``fetch``: results come back to the host without stopping the device."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar, overload

from torch import Tensor

from millstream.device import Place, context
from millstream.errors import ArgumentError, FeedError
from millstream.locks import ForkSafeLock
from millstream.results.fetcher import Fetcher
from millstream.results.result import Fetched, OnResult, flatten

Plain = TypeVar("Plain", None, bool, int, float, str)
K = TypeVar("K")
V = TypeVar("V")


@overload  # a tensor comes back as one or as a number, by its shape, which no type tells
def fetch(value: Plain, *, step: int | None = None, callback: OnResult = None) -> Fetched[Plain]: ...
@overload
def fetch(value: dict[K, V], *, step: int | None = None, callback: OnResult = None) -> Fetched[dict[K, Any]]: ...
@overload
def fetch(value: list[Any], *, step: int | None = None, callback: OnResult = None) -> Fetched[list[Any]]: ...
@overload
def fetch(value: Any, *, step: int | None = None, callback: OnResult = None) -> Fetched[Any]: ...
def fetch(value: Any, *, step: int | None = None, callback: OnResult = None) -> Fetched[Any]:
    """Bring a result to the host; neither the host nor the device waits for it.

    ::

        loss = ms.fetch(train_step(x, y), step=i)
        ...
        print(loss.result())

    Args:
        value: A tensor, or any batch-like tree of tensors, as it will be when all that is queued on the current stream
            is done. It may be overwritten afterwards.
        step: The step it belongs to, for messages.
        callback: Called with the result, in the fetcher's thread; in the caller's, if nothing of it is on a device.

    Returns:
        A future. Its result is ``value`` with tensors on the host, and tensors without dimensions as Python numbers (as
        ``item()`` makes them). Futures of one device are completed in the order of the calls. When many are on their
        way (256), the call waits for the first of them. An error of the device is raised by ``result()``.

    Raises:
        ArgumentError: ``callback`` cannot be called.
        FeedError: The current stream is being captured, or the tensors are of several devices.
    """
    if callback is not None and not callable(callback):
        raise ArgumentError(f"callback is {callback!r}; it must be a function of the result.")
    places = {leaf.device for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    if len(places) > 1:
        raise FeedError(f"A result with tensors on {', '.join(sorted(map(str, places)))} must be fetched in parts.")
    fetcher = _find_fetcher(Place.of(places.pop() if places else "cpu"))
    return fetcher.put(value, step=step, callback=callback)


class fetch_each:  # noqa: N801 - used like a function
    """Iterate over results on the host, in order, some steps behind the device: with ``for``, or ``async for``.

    ::

        for loss in fetch_each(train_step(x, y) for x, y in ms.feed(loader, "cuda")):
            ...

    Args:
        values: Yields device results; it is asked for up to ``ahead`` more than have come back.
        ahead: How many may be on their way, at least 1.
    """

    def __init__(self, values: Iterable[Any], ahead: int = 8) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ArgumentError(f"ahead is {ahead!r}; it must be an integer of at least 1.")
        self._values = values
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        """Block for each result."""
        for future in self._futures():
            yield future.result()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Await each result."""
        for future in self._futures():
            yield await future

    def _futures(self) -> Iterator[Fetched[Any]]:
        waiting: deque[Fetched[Any]] = deque()
        values = enumerate(self._values)
        while True:
            try:
                if (each := next(values, None)) is None:
                    break
                waiting.append(fetch(each[1], step=each[0]))
                del each
            except Exception:
                yield from waiting  # it comes where its value would have come
                raise
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        yield from waiting


_fetchers: dict[Place, Fetcher] = {}
_fetchers_lock = ForkSafeLock()


def _find_fetcher(place: Place) -> Fetcher:
    device = context(place)
    fetcher = _fetchers.get(place)
    if fetcher is None or fetcher.context is not device or fetcher.closed:
        with _fetchers_lock.lock:
            fetcher = _fetchers.get(place)
            if fetcher is None or fetcher.context is not device or fetcher.closed:
                fetcher = _fetchers[place] = Fetcher(device)
                device.attach(fetcher)
    return fetcher
