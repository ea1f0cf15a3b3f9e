"""Divide the work of our convolution kernel among blocks: by the sizes alone, alike in any process.

Figures are in ``docs/decisions/own-kernels.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """The share of a block, and how much it computes from at a time.

    Attributes:
        pixels: Of the result.
        channels: Of the result.
        depth: How many products are summed in a step.
        stages: How many steps' numbers are on their way to the multiprocessor.
    """

    pixels: int
    channels: int
    depth: int
    stages: int


SPLIT_TILE = Tile(64, 64, 64, 4)
_SPLIT_BLOCKS = 132  # as many as a device has multiprocessors
_MOST_SPLITS = 16


def choose_tile(
    weight: torch.Tensor, output: torch.Tensor, stride: list[int], padding: list[int], together: int = 1
) -> Tile | None:
    """The tile that takes the least time, alone and beside others; ``None`` where cuDNN's kernels do.

    From the times of 27 tiles for 151 convolutions of five networks at batch 1 on an H200, of which 2 stay with cuDNN.
    All of them take 1 % longer than with the best for each. Of several at once the blocks of all count.

    Args:
        weight: Of the convolution.
        output: Of the convolution.
        stride: Of the convolution.
        padding: Of the convolution.
        together: How many such convolutions one launch computes.
    """
    pixels, outputs = num_pixels(output), output.shape[1]
    row, rows = weight.shape[1] * weight.shape[3], weight.shape[2]
    depth = row * rows
    num_blocks = ceil_div(pixels, 64) * ceil_div(outputs, 32)
    pointwise = is_pointwise(weight, stride, padding)
    # Large products are what cuDNN's blocks are made for; longer sums than these it computes in parts.
    most = 200_000 if pointwise else 360_000 if depth <= 720 else 160_000
    if num_blocks * depth > most or depth > 4608:
        return None
    num_blocks *= together
    # From five of 168 channels at 42 x 42; a single one with so many blocks was not tried.
    if together > 1 and num_blocks > 500 and pointwise and 64 < depth <= 300:
        return Tile(128, 64, 64, 3)
    if row <= 32:
        return Tile(64, 64, 32, 4)
    if num_blocks > 130:
        return Tile(64, 32, 32, 5) if outputs <= 32 else Tile(64, 64, 32, 4) if depth <= 300 else Tile(64, 64, 64, 4)
    if pointwise and depth >= 336:
        return Tile(64, 16, 128, 3) if num_blocks <= 42 else Tile(64, 32, 128, 3)
    if pointwise:
        return Tile(64, 16, 64, 4) if num_blocks <= 48 else Tile(64, 32, 64, 3)
    unused = -row % 128 / row  # of a tile's depth, where a row ends within it
    if num_blocks <= 12 or (num_blocks <= 32 and row >= 128 and unused <= 0.15):
        return Tile(16, 32, 128, 4)
    if num_blocks > 25 and row <= 120:
        return Tile(64, 32, 32, 5)
    if num_blocks > 25 and row >= 128 and unused <= 0.2:
        return Tile(64, 16, 128, 3) if num_blocks <= 64 else Tile(64, 32, 128, 3)
    return Tile(64, 16, 64, 4) if num_blocks <= 64 else Tile(64, 32, 32, 5)


def choose_splits(weight: torch.Tensor, output: torch.Tensor) -> int:
    """Among how many blocks to split each sum, where sums are long and so few that they do not fill the device; or 1.

    As many for several convolutions at once as for one: the numbers are the same.

    Args:
        weight: Of the convolution.
        output: Of the convolution.
    """
    steps = weight.shape[2] * ceil_div(weight.shape[1] * weight.shape[3], SPLIT_TILE.depth)
    num_blocks = ceil_div(num_pixels(output), SPLIT_TILE.pixels) * ceil_div(output.shape[1], SPLIT_TILE.channels)
    is_small = weight.shape[2] * weight.shape[3] > 1 and num_blocks <= 15
    if steps < (21 if is_small and num_blocks >= 10 else 24):  # takes no less time so
        return 1
    splits = max(min(round(_SPLIT_BLOCKS / num_blocks), steps // (3 if is_small else 4), _MOST_SPLITS), 1)
    return ceil_div(steps, ceil_div(steps, splits))


def is_pointwise(weight: torch.Tensor, stride: list[int], padding: list[int]) -> bool:
    """Return whether the window is one pixel, and each pixel has one."""
    return (*weight.shape[2:], *stride, *padding) == (1, 1, 1, 1, 0, 0)


def ceil_div(number: int, size: int) -> int:
    """Return how many pieces of a size it takes for so many."""
    return -(-number // size)


def num_pixels(out: torch.Tensor) -> int:
    """Return how many there are in all images of a batch."""
    return out.shape[0] * out.shape[2] * out.shape[3]
