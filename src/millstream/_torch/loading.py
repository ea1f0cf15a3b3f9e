"""Where a DataLoader waits, and where its workers make a batch. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

NEXT: tuple[type, str] = (dataloader._BaseDataLoaderIter, "__next__")
"""What every loop over a DataLoader calls for a batch."""

FETCHES: tuple[tuple[type, str], ...] = ((fetch._MapDatasetFetcher, "fetch"), (fetch._IterableDatasetFetcher, "fetch"))
"""What makes a batch, in a worker or in the loop's own process."""


def makes_in_process(iterator: Any) -> bool:
    """Whether a DataLoader's iterator makes batches where it is asked for them."""
    return isinstance(iterator, dataloader._SingleProcessDataLoaderIter)


def workers_of(iterator: Any) -> int:
    """Worker processes of a DataLoader's iterator."""
    return int(getattr(iterator, "_num_workers", 0))


def item_maker(iterator: Any) -> Callable[..., Any] | None:
    """What makes an item: the data set's ``__getitem__``, or its ``__iter__``; the innermost of subsets."""
    dataset = getattr(iterator, "_dataset", None)
    for _ in range(8):
        inner = getattr(dataset, "dataset", None)
        if inner is None or not type(dataset).__module__.startswith("torch."):
            break
        dataset = inner
    for name in ("__getitems__", "__getitem__", "__iter__"):
        function = getattr(type(dataset), name, None)
        if hasattr(function, "__code__"):
            return function  # type: ignore[no-any-return]
    return None
