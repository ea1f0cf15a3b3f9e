"""Where a DataLoader waits, where workers make a batch, and when it draws their seed. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import fetch

NEXT: tuple[type, str] = (dataloader._BaseDataLoaderIter, "__next__")
"""What every loop over a DataLoader calls for a batch."""

START: tuple[type, str] = (dataloader._MultiProcessingDataLoaderIter, "__init__")
"""What starts worker processes: for every pass, unless they are persistent."""

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


def has_workers(loader: Any) -> bool:
    """Whether the next pass uses worker processes of one before, and so draws no seed for them."""
    loader = _unwrap(loader)
    return (
        isinstance(loader, DataLoader)
        and bool(loader.persistent_workers and loader.num_workers)
        and loader._iterator is not None
    )


def drop_workers(loader: Any) -> None:
    """End persistent worker processes: the next pass starts new ones, and draws a seed for them."""
    _unwrap(loader)._iterator = None


@contextmanager
def seed_drawn_aside(loader: Any) -> Iterator[None]:
    """``iter(loader)`` draws the seed for its workers from a copy of its generator, and moves the latter no further."""
    loader = _unwrap(loader)
    if not isinstance(loader, DataLoader):
        yield
        return
    given = loader.generator
    loader.generator = (torch.default_generator if given is None else given).clone_state()
    try:
        yield
    finally:
        loader.generator = given


def _unwrap(loader: Any) -> Any:
    """The DataLoader in a loader of accelerate."""
    while (inner := vars(loader).get("base_dataloader") if hasattr(loader, "__dict__") else None) is not None:
        loader = inner
    return loader
