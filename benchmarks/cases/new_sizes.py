"""What a size costs that a compiled step has not met, its kernels being there; and what a hundred sizes hold.

Run in a process of its own: its last line is JSON, see ``measure``. A step of a transformer with Adam is compiled for
all lengths, and planned at one; then lengths come that are new.

- ``first``, ``second``, ``third``: seconds of the first three calls with a new length, ``eager`` of eager's call.
- ``held``: bytes that PyTorch's allocator holds without any graph, after the longest text alone, and after all lengths,
  from the longest to the shortest and the other way; and what the device lacks beside that, such as CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import millstream as ms
from benchmarks.cases.sizes import Text
from benchmarks.measuring.harness import prepare_torch, synchronize
from millstream import api

COMPILED = (96,) * 5  # by eager, which makes the optimizer's state; new, measured, planned and captured, replayed
LAYERS, WIDTH = 12, 256
Step = Callable[[torch.Tensor], torch.Tensor]


def make(device: torch.device, layers: int, width: int) -> Step:
    """A training step on texts of any length."""
    torch.manual_seed(0)
    with device:
        model = Text(layers, width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def seconds(step: Step, length: int, device: torch.device) -> float:
    """Time of one call that finds the device idle, until its result is there."""
    tokens = torch.randint(100, (4, length), device=device)
    synchronize(device)
    start = time.perf_counter()
    step(tokens)
    synchronize(device)
    return time.perf_counter() - start


def held(device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator holds, and that the device lacks beside those."""
    gc.collect()
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return reserved, total - free - reserved


def measure(device: torch.device, num_sizes: int, *, tiny: bool = False) -> dict[str, Any]:
    """Measure a step; ``tiny`` has less of everything, to try the script."""
    layers, width = (1, 32) if tiny else (LAYERS, WIDTH)
    compiled, eager = ms.step(make(device, layers, width), strict=True, dynamic=True), make(device, layers, width)
    for length in COMPILED:
        seconds(compiled, length, device)
    longest = 512 if not tiny else 160
    lengths = [longest - 4 * number for number in range(num_sizes)]
    found: dict[str, Any] = {"kernels": api.executables(compiled)[-1].num_kernels}
    new = [length + 2 for length in lengths[1:11]]
    for length in new:
        seconds(eager, length, device)
    found["eager"] = median(seconds(eager, length, device) for length in new)
    calls = [[seconds(compiled, length, device) for _ in range(3)] for length in new]
    for name, times in zip(("first", "second", "third"), zip(*calls, strict=True), strict=True):
        found[name] = median(times)
    found["slowest second"] = max(times[1] for times in calls)
    found["held"] = {}
    for order, numbers in (("falling", lengths), ("rising", lengths[::-1])):
        for executable in api.executables(compiled):
            executable.release()
        found["held"].setdefault("none", held(device))
        for place, length in enumerate(numbers):
            for _ in range(3):
                seconds(compiled, length, device)
            if order == "falling" and not place:
                found["held"]["alone"] = held(device)
        found["held"][order] = held(device)
    found["graphs"] = len(compiled.graphs)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--sizes", type=int, default=100)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prepare_torch()
    print(json.dumps(measure(options.device, options.sizes, tiny=options.tiny)))
