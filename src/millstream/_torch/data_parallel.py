"""PyTorch's data-parallel wrappers: which parameters they own, and their forward around a compiled module.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from millstream.heap import instances


def data_parallel_wrappers() -> list[nn.Module]:
    """The wrappers alive in this process that reduce gradients outside of autograd's graph.

    ``DistributedDataParallel`` and ``FullyShardedDataParallel`` leave no trace on the modules or parameters that they
    own, other than C++ hooks that Python cannot see, so they are looked for among all objects. Without a process group
    there are none.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    kinds = (DistributedDataParallel, *_fully_sharded())
    return instances(kinds)


def _fully_sharded() -> Iterator[type[nn.Module]]:
    module = sys.modules.get("torch.distributed.fsdp")  # without it nobody has made one
    for name in ("FullyShardedDataParallel", "FSDPModule"):
        if (kind := getattr(module, name, None)) is not None:
            yield kind


def call_around(wrapper: DistributedDataParallel, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of ``wrapper``, buffers broadcast and reducer prepared, with ``compiled`` in place of its module.

    The result shares all state with ``wrapper``, ``no_sync()`` included, and leaves it as it is: a property of the
    class comes before the submodule of that name.
    """
    kind = type(type(wrapper).__name__, (type(wrapper),), {"module": property(lambda _: compiled)})
    around = object.__new__(kind)
    around.__dict__ = wrapper.__dict__
    return around
