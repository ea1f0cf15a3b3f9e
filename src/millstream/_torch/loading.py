"""Hooks into a DataLoader: waiting for a batch, making one in a worker, drawing seeds. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from types import FunctionType, GeneratorType
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
    """Return whether a DataLoader's iterator makes batches where it is asked for them."""
    return isinstance(iterator, dataloader._SingleProcessDataLoaderIter)


def workers_of(iterator: Any) -> int:
    """Worker processes of a DataLoader's iterator."""
    return int(getattr(iterator, "_num_workers", 0))


def item_maker(iterator: Any) -> Callable[..., Any] | None:
    """Return what makes an item: the data set's ``__getitem__``, or its ``__iter__``; the innermost of subsets."""
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


def find_loader(source: Any) -> DataLoader[Any] | None:
    """The one DataLoader that a source is or wraps; ``None`` if none is found, or several.

    It may be in an attribute, a variable of a generator or one that a function encloses, also of a wrapped wrapper.
    """
    sources, seen = [source], {id(source)}
    for _ in range(4):
        if found := [each for each in sources if isinstance(each, DataLoader)]:
            return found[0] if len(found) == 1 else None
        inner = {id(each): each for each in chain.from_iterable(map(_held_by, sources)) if id(each) not in seen}
        seen |= inner.keys()
        sources = [*inner.values()]
    return None


def _held_by(source: Any) -> Iterable[Any]:
    """Return what a source may iterate over."""
    held: Iterable[Any] = ()
    if isinstance(source, FunctionType):
        with suppress(ValueError):  # of a variable that has no value yet
            held = [cell.cell_contents for cell in source.__closure__ or ()]
    elif isinstance(source, GeneratorType):
        if source.gi_frame is not None:
            variables = source.gi_frame.f_locals
            held = [*variables.values()]
            if isinstance(variables, dict):  # before Python 3.13 a copy, which the frame would keep until it ends
                variables.clear()
    else:
        with suppress(AttributeError):  # of the user's ``__getattr__`` nobody knows what it does
            held = object.__getattribute__(source, "__dict__").values()
    return [each for each in held if hasattr(type(each), "__iter__") or isinstance(each, FunctionType)]


def has_known_samplers(loader: DataLoader[Any]) -> bool:
    """Return whether its samplers are PyTorch's, which draw from global generators once, when they are first asked.

    Others may draw in ``__iter__``, which is called twice where workers start, and the seed for them is drawn between;
    or for each batch, of which workers are sent some ahead.
    """
    sampler = loader._index_sampler
    samplers = (sampler, getattr(sampler, "sampler", sampler))
    return all(type(each).__module__.startswith("torch.utils.data.") for each in samplers)


def has_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the next pass uses worker processes of one before, and so draws no seed for them."""
    return bool(loader.persistent_workers and loader.num_workers) and loader._iterator is not None


def drop_workers(loader: DataLoader[Any]) -> None:
    """End persistent worker processes: the next pass starts new ones, and draws a seed for them."""
    loader._iterator = None


@contextmanager
def seed_drawn_aside(loader: DataLoader[Any]) -> Iterator[None]:
    """``iter(loader)`` draws the seed for its workers from a copy of its generator, and moves the latter no further."""
    given = loader.generator
    loader.generator = (torch.default_generator if given is None else given).clone_state()
    try:
        yield
    finally:
        loader.generator = given
