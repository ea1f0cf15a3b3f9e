"""A process group of many, of which there is only this process: collectives change nothing, and nobody is waited for.

PyTorch's ``fake`` backend, which its own tests use. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


@contextmanager
def among_fake_processes(size: int, rank: int = 0) -> Iterator[None]:
    """Within the context this process is one of ``size``, as torchrun would start it on a host for all of them.

    ``init_process_group`` gives the fake group, whatever backend is asked for, and ``destroy_process_group`` leaves it
    until the end.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    where = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    where |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "MILLSTREAM_COLLECTIVES": "between"}
    begin, end = dist.init_process_group, dist.destroy_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            begin("fake", store=FakeStore(), rank=rank, world_size=size)

    with mock.patch.dict(os.environ, where):
        modules = (dist, dist.distributed_c10d)
        patches = [mock.patch.object(module, "init_process_group", init_process_group) for module in modules]
        patches += [mock.patch.object(module, "destroy_process_group", return_value=None) for module in modules]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
            if dist.is_initialized() and dist.get_backend() == "fake":
                end()
