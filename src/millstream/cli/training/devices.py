"""Training on several devices: a process each, started by PyTorch's elastic launcher, all on one batch's rows.

Each process has its share of the rows and of the carried state, so that the mean of the gradients, and of the losses,
is that of the whole batch on one device. Checkpoints are those of one device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from millstream.cli.training.job import Carry, Job, find_device
from millstream.errors import ArgumentError

STEPS_BETWEEN_ASKS = 10
"""Processes ask each other so seldom whether one of them is to stop: on a GPU it makes the host wait."""


def launch(argv: Sequence[str], count: int) -> int:
    """Run the same command line in ``count`` processes; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.call([*command, "-m", "millstream", *argv])


def check_devices(name: str | None, count: int) -> None:
    """See that there are as many.

    Raises:
        ArgumentError: There are not, or one is named.
    """
    kind = find_device(name).type
    if name is not None and ":" in name:
        raise ArgumentError(f"--device {name!r} is one device; with --devices {count} say cpu or cuda")
    if kind == "cuda" and torch.cuda.device_count() < count:
        raise ArgumentError(f"--devices {count} are not there; PyTorch sees {torch.cuda.device_count()} CUDA devices")


def own_device(name: str | None) -> str:
    """The device of this process, which becomes the current one."""
    if find_device(name).type != "cuda":
        return "cpu"
    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def is_launched() -> bool:
    """Whether a launcher has started this process, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ


class Team:
    """The processes that train together.

    Attributes:
        rank: Of this one.
        size: Their number.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device) -> Iterator[Team]:
        """For the length of the context, be one of the processes that the launcher has started."""
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield cls()
        finally:
            dist.destroy_process_group()

    def rows(self, tensor: Tensor) -> Tensor:
        """This process's share of the rows.

        Raises:
            ArgumentError: They cannot be shared equally.
        """
        if len(tensor) % self.size:
            raise ArgumentError(f"a batch of {len(tensor)} cannot be shared by {self.size} devices: change --batch")
        return tensor.chunk(self.size)[self.rank].contiguous()

    def share(self, job: Job, carry: Carry) -> Job:
        """The job on this process's rows, with the mean of all losses, going on from ``carry``, that of all rows."""
        take, size = job.step, self.size

        def train_step(inputs: Tensor, targets: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
            loss, carry = take(inputs, targets, carry)
            mean = loss / size
            dist.all_reduce(mean)
            return mean, carry

        def batches(start: int) -> Iterator[tuple[Tensor, Tensor]]:
            for inputs, targets in job.batches(start):
                yield self.rows(inputs), self.rows(targets)

        return replace(job, step=train_step, batches=batches, carry=tuple(map(self.rows, carry)))

    def join_rows(self, carry: Carry) -> Carry:
        """The state of all rows; a collective."""
        parts = [[torch.empty_like(value) for _ in range(self.size)] for value in carry]
        for value, part in zip(carry, parts, strict=True):
            dist.all_gather(part, value.contiguous())
        return tuple(map(torch.cat, parts))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is so in any process; a collective."""
        told = torch.tensor(float(flag), device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())
