"""What ``millstream profile`` costs a step: blocks of steps with and without it, in turn, in one process.

*Always on* is what a whole run pays: hooks and samples. *Window* is the device's own profiler (CUPTI), which twenty
steps pay. A step waits for the device, and the lower quartile of all of a kind is compared: on a shared machine, steps
of pure Python alone differ by a factor of two from block to block.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from millstream.trace import ProfiledRun
from millstream.trace.device_profile import DeviceWindow

NUM_ROUNDS, NUM_STEPS, NUM_DROPPED = 8, 14, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _training(model: nn.Module, x: torch.Tensor, **how: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **how)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tiny_kernels() -> Callable[[], None]:
    """Over a thousand launches: the worst case."""
    model = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())]).to(DEVICE)
    return _training(model, torch.randn(16, 64, device=DEVICE), foreach=False)


def large_kernels() -> Callable[[], None]:
    """Nine milliseconds of matrix products on an H100."""
    width, rows = (2048, 2048) if DEVICE == "cuda" else (128, 64)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]).to(DEVICE)
    return _training(model, torch.randn(rows, width, device=DEVICE))


def pure_python() -> Callable[[], None]:
    """A loop that never gives the interpreter away by itself."""

    def step() -> None:
        total = 0
        for number in range(150_000):
            total += number * number

    return step


@contextmanager
def always_on() -> Iterator[None]:
    """Hooks and samples."""
    session = ProfiledRun(uses_device=False)
    session.start()
    try:
        yield
    finally:
        session.stop()


@contextmanager
def window() -> Iterator[None]:
    """The device's profiler, which is detached afterwards."""
    device = DeviceWindow()
    device._begin(with_stack=False)
    try:
        yield
    finally:
        device._end(is_last=True)
        device.close(0)


def measure(step: Callable[[], None], kinds: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of a step by kind: lower quartiles."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None)
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(NUM_ROUNDS):
        for name, kind in kinds.items():
            with kind():
                for number in range(NUM_STEPS):
                    wait()
                    start = time.perf_counter()
                    step()
                    wait()
                    if number >= NUM_DROPPED:
                        took[name].append((time.perf_counter() - start) * 1e3)
    return {name: quantiles(times, n=4)[0] for name, times in took.items()}


def to_markdown(rows: Sequence[dict[str, Any]], device: str) -> str:
    """A table of shares."""
    lines = [
        "# What profiling costs a step",
        "",
        f"`python -m benchmarks.idle.cost` on {device}, torch {torch.__version__}; lower quartiles of "
        f"{NUM_ROUNDS * (NUM_STEPS - NUM_DROPPED)} steps, kinds in turn. *Off again* is the noise.",
        "",
        "| step | off, ms | off again | always on | window |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        shares = (f"{row[name] / row['off'] - 1:+.1%}".replace("%", " %") if name in row else "" for name in _SHOWN)
        lines.append(f"| {row['step']} | {row['off']:.3g} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


_SHOWN = ("off again", "always on", "window")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all, and write a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle.cost", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args(argv)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    kinds: dict[str, Callable[[], Any]] = {"off": nullcontext, "always on": always_on, "off again": nullcontext}
    rows = []
    for make in (tiny_kernels, large_kernels, pure_python):
        step = make()
        for _ in range(NUM_DROPPED):
            step()
        found = measure(step, kinds)
        if DEVICE == "cuda":  # apart: a process that it has been in is another one
            beside = measure(step, {"off": nullcontext, "window": window})
            found["window"] = beside["window"] / beside["off"] * found["off"]
        rows.append({"step": make.__name__.replace("_", " "), **found})
        print(json.dumps(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "idle_cost.md").write_text(to_markdown(rows, name), encoding="utf-8")
    print(to_markdown(rows, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
