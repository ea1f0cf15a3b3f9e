"""Data parallel over sequences whose lengths differ between processes and steps, beside DDP with torch.compile.

``torchrun --standalone --nproc-per-node=N -m benchmarks.sweeps.ragged --out ragged.json`` trains a transformer of four
layers on batches padded to a multiple of 64 tokens, up to 512, of each process's own lengths. Of each side it tells
seconds to build and warm up (the first steps), milliseconds a step of the rest, from barrier to barrier, and of ours
how many of those steps ran a program that was not captured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import millstream as ms
from benchmarks.cases.networks import Transformer
from benchmarks.measuring.harness import prepare_torch
from benchmarks.parallel import join_group
from millstream.engine.cuda.cuda_graph import CudaGraphEngine

VOCABULARY, ROWS, MULTIPLE = 1000, 8, 64
WARM_UP = 100  # of the steps


def make_step(wrap: Callable[[Any], Any], compile_model: bool, device: torch.device) -> Any:
    torch.manual_seed(0)
    model = Transformer(4, 256, 4, vocab=VOCABULARY, length=512).to(device)
    ddp: Any = DistributedDataParallel(model)
    run = torch.compile(ddp) if compile_model else ddp
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out = run(tokens[:, :-1])
        loss = F.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return wrap(step)


def counting_serial_calls() -> list[int]:
    """How often a program that could be a graph has run kernel by kernel."""
    count, run = [0], CudaGraphEngine._run_serially

    def counted(self: CudaGraphEngine, inputs: list[Any], **kwargs: Any) -> list[Any]:
        count[0] += 1
        return run(self, inputs, **kwargs)

    CudaGraphEngine._run_serially = counted  # type: ignore[method-assign]
    return count


def measure(step: Any, data: list[Tensor], device: torch.device) -> dict[str, Any]:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    serial, found = counting_serial_calls(), {}
    warm_up = min(WARM_UP, len(data) // 2)
    for name, part in (("warm_up_s", data[:warm_up]), ("steps_s", data[warm_up:])):
        synchronize()
        serial[0], start = 0, time.perf_counter()
        losses = [step(tokens).detach() for tokens in part]
        synchronize()
        found[name] = time.perf_counter() - start
    found["step_ms"] = 1000 * found.pop("steps_s") / (len(data) - warm_up)
    return {**found, "not_captured": serial[0], "loss": float(losses[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    prepare_torch()
    device = join_group(options.device)
    rank = dist.get_rank()
    choice, generator = random.Random(rank), torch.Generator().manual_seed(rank)
    lengths = [MULTIPLE * -(-choice.randint(1, 512) // MULTIPLE) for _ in range(options.steps)]
    data = [torch.randint(VOCABULARY, (ROWS, each + 1), generator=generator).to(device) for each in lengths]
    answers: dict[str, Any] = {"processes": dist.get_world_size(), "steps": options.steps, "device": options.device}
    if device.type == "cuda":
        answers["device"] = torch.cuda.get_device_name(device)
    for side, wrap in (("ours", ms.step), ("ddp compile", lambda step: step)):
        step = make_step(wrap, side == "ddp compile", device)
        mine = measure(step, data, device)
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine)
        answers[side] = {name: max(each[name] for each in theirs) for name in mine if name != "loss"}
        answers[side]["losses"] = [each["loss"] for each in theirs]
    if rank == 0:
        answers["ratio"] = answers["ddp compile"]["step_ms"] / answers["ours"]["step_ms"]
        options.out.write_text(json.dumps(answers, indent=1) + "\n")
        print(json.dumps(answers))
    dist.barrier()
    os._exit(0)  # graphs would have destroy_process_group wait


if __name__ == "__main__":
    main()
