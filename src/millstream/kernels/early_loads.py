"""Which kernels may read their weights before the kernel in front has ended (``launches.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from millstream._torch.workarounds import left_out

SWITCH = "early-loads"

_written: ContextVar[frozenset[int] | None] = ContextVar("written", default=None)


@contextmanager
def early_loads(written: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let kernels that are captured meanwhile load early.

    Only for captures of a whole graph of our own: on a stream, or in a graph of the user's, the kernel in front may be
    one that writes weights.

    Args:
        written: Tensors in whose memory something is written, though no kernel says so: slots for inputs.
    """
    token = _written.set(frozenset(each.untyped_storage().data_ptr() for each in written))
    try:
        yield
    finally:
        _written.reset(token)


def may_load_early(tensor: torch.Tensor) -> bool:
    """Return whether a kernel that is launched now may read this tensor, which no kernel writes, before it waits."""
    written = None if SWITCH in left_out() else _written.get()
    return written is not None and tensor.untyped_storage().data_ptr() not in written
