"""What the planted scripts have in common: the device, a network that keeps it busy for a while, and a clock."""

import sys
import time

import torch
from torch import nn

FIXED = "fixed" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() and "cpu" not in sys.argv else "cpu"
ON_GPU = DEVICE == "cuda"
TIMED_FROM = 40  # steps: by then, windows are over
STEPS = 80 if ON_GPU else 30
BATCH = 2048 if ON_GPU else 64  # on a GPU, long kernels: launching must not be what a step takes


def network(inputs, width=2048, depth=8):
    """About ten milliseconds of a training step on an H100 with ``BATCH`` rows; a small one on a CPU."""
    if not ON_GPU:
        return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 1))
    middle = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *middle, nn.Linear(width, 1)).to(DEVICE)


def to_batch(rows):
    """A few rows of a loader, as a batch of full size on a GPU; nobody waits for the copy."""
    return rows.to(DEVICE, non_blocking=True).repeat(BATCH // len(rows), 1) if ON_GPU else rows


class Clock:
    """Prints, at the script's end, the mean length of a step from the 40th on (from half of them on a CPU)."""

    def __init__(self, first=TIMED_FROM if ON_GPU else STEPS // 2):
        self.first, self.number, self.began = first, 0, 0.0

    def tick(self):
        self.number += 1
        self.latest = time.perf_counter()
        if self.number == self.first:
            self.began = self._now()

    def _now(self):
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()

    def show(self):
        if self.number > self.first:
            end = self._now() if ON_GPU else self.latest
            print(f"step_ms {(end - self.began) / (self.number - self.first) * 1e3:.4f}", flush=True)
