"""A process group of the same processes as another, with a communicator of its own.

Tried on torch 2.11 and 2.13; NCCL's options of 2.11 and 2.12 were looked at.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from millstream._torch.distributed.collectives import backend_of, timeout_of


def new_communicator(group: Any, device: torch.device, max_ctas: int | None) -> Any:
    """A process group of the processes of ``group``, made in all of them at once.

    Args:
        group: Of all processes of the run. A group of some could only be made with all others taking part, or under a
            name that PyTorch may give twice.
        device: Where its collectives run.
        max_ctas: At most so many thread blocks a collective, each of which takes a multiprocessor; ``None`` for what
            NCCL chooses. Other backends have no such number.

    Raises:
        RuntimeError: It cannot be made.
    """
    if dist.get_process_group_ranks(group) != list(range(dist.get_world_size())):
        raise RuntimeError("its process group is not of all processes in order")
    backend, timeout, options = backend_of(group, device), timedelta(seconds=timeout_of(group)), None
    if backend not in ("nccl", "gloo"):
        raise RuntimeError(f"its process group is of {backend}, not of NCCL or Gloo")
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            if max_ctas is not None:
                options.config.max_ctas = max_ctas
        return dist.new_group(timeout=timeout, backend=backend, pg_options=options, group_desc="millstream")
    except (AttributeError, AssertionError, TypeError, ValueError) as error:  # of another version of PyTorch
        raise RuntimeError(str(error)) from error
