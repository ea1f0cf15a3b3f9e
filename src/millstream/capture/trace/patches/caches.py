"""Functions behind ``functools.lru_cache``: tensors that tracing makes must not stay in their caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from millstream.capture.state.contents import without_cache
from millstream.capture.state.executed import function_asking


class CachesUnfilled(TorchFunctionMode):
    """For the length of the context, ``report`` the name of a function that is about to make a tensor for a cache.

    It has been called, so its cache has no answer yet. ``report`` must raise: then there is nothing to keep, and an
    eager call can fill the cache with tensors that have values. A call without the cache, by ``__wrapped__``, may make
    tensors. A cache counts a call before it asks its function, and so the two can be told apart.

    Args:
        caches: What ``functools.lru_cache`` has made of functions.
        report: Called with the function's name.
    """

    def __init__(self, caches: Sequence[Any], report: Callable[[str], None]) -> None:
        super().__init__()
        self._codes = {without_cache(cache).__code__ for cache in caches}
        self._report = report
        self._counts = {id(cache): cache.cache_info().misses for cache in caches}
        self._without: list[FrameType] = []  # calls that no cache has made

    def is_for_cache(self, frame: FrameType, caches: Iterable[Any]) -> bool:
        """Return whether a call that begins is one that a cache has made.

        To be asked once of each call of these functions.
        """
        asked = [cache for cache in caches if without_cache(cache).__code__ is frame.f_code]
        counts = {id(cache): cache.cache_info().misses for cache in asked}
        is_counted = any(self._counts.get(each) != count for each, count in counts.items())
        self._counts |= counts
        if asked and not is_counted:
            self._without.append(frame)
        return is_counted

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._without.clear()
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a look at an attribute makes nothing
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code in self._codes and not any(frame is each for each in self._without):
                    self._report(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
        return function_asking(func, sys._getframe(1))(*args, **(kwargs or {}))
