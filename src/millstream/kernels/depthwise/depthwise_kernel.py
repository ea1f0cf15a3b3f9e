"""The Triton kernel of ``depthwise``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

from millstream.kernels.conv2d.conv2d_kernel import choose

# Compiled for each window and for what the number of channels is a multiple of, not for each size of image.
_ANY = ["num_runs", "runs_a_line", "height", "width", "out_height", "out_width", "channels", "image_channels",
        "out_channels", "num_first", "pad_y", "pad_x", "second_pad_y", "second_pad_x"]  # fmt: skip


@triton.jit(do_not_specialize=_ANY)
def depthwise(
    images,
    weights,
    outs,
    num_runs,
    runs_a_line,
    height,
    width,
    out_height,
    out_width,
    channels,
    image_channels,
    out_channels,
    num_first,
    pad_y,
    pad_x,
    second_pad_y,
    second_pad_x,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    IS_RELU: tl.constexpr,
    IMAGE_AT_ONCE: tl.constexpr,
    OUT_AT_ONCE: tl.constexpr,
    WINDOWS: tl.constexpr,
    RUN: tl.constexpr,
    TILE_RUNS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Convolve each channel of each image with its own window.

    All images have the same size, and so have their results; of windows there are two sizes at most. The last direction
    of the grid says on which image a block works.

    Args:
        images: Each in memory: images of a batch, rows, columns, channels.
        weights: Each in memory: channels, rows, columns.
        outs: Like ``images``.
        num_runs: Of each result, of all images of the batch; ``runs_a_line`` in a row of pixels, of which the last may
            be shorter.
        channels: Of each weight.
        image_channels: Of an image, in units of ``IMAGE_AT_ONCE``; so the compiler knows what they are a multiple of.
        out_channels: Of a result, likewise. Those after ``channels`` are set to zero.
        num_first: How many of the images have the first window; the others have the second.
        pad_y: For the first window; ``second_pad_y`` for the second.
        IS_RELU: Whether to apply relu to the images.
        WINDOWS: Height and width of the first window, and of the second if there is one.
        RUN: Four.
        STARTS_EARLY: Whether to start before the kernel in front has ended (``launches.py``).
    """
    which = tl.program_id(2)
    image, weight, out = choose(images, which), choose(weights, which), choose(outs, which)
    image_channels *= IMAGE_AT_ONCE
    out_channels *= OUT_AT_ONCE
    run = tl.program_id(0) * TILE_RUNS + tl.arange(0, TILE_RUNS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    if STARTS_EARLY:
        gdc_wait()
    for k in tl.static_range(len(WINDOWS)):
        if (which < num_first) == (k == 0):
            _convolve(
                image, weight, out, run, channel, num_runs, runs_a_line, height, width, out_height, out_width, channels,
                image_channels, out_channels, pad_y if k == 0 else second_pad_y, pad_x if k == 0 else second_pad_x,
                STRIDE_Y, STRIDE_X, DILATION_Y, DILATION_X, IS_RELU, WINDOWS[k][0], WINDOWS[k][1], RUN, TILE_RUNS,
                TILE_CHANNELS,
            )  # fmt: skip
    if STARTS_EARLY:
        gdc_launch_dependents()


@triton.jit
def _convolve(
    image, weight, out, run, channel, num_runs, runs_a_line, height, width, out_height, out_width, channels,
    image_channels, out_channels, pad_y, pad_x, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr, DILATION_X: tl.constexpr, IS_RELU: tl.constexpr, KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, RUN: tl.constexpr, TILE_RUNS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute some runs of some channels of a result.

    A thread computes four pixels that lie side by side, a *run*, and so loads a column once for all that read it, and a
    tap once for all four.
    """
    is_run, is_channel = run < num_runs, channel < channels
    line = run // runs_a_line
    out_x = (run - line * runs_a_line) * RUN
    y = line % out_height * STRIDE_Y - pad_y
    x = out_x * STRIDE_X - pad_x
    first = ((line // out_height * height + y) * width + x) * image_channels
    values = image + first[:, None] + channel[None, :]
    taps = weight + channel * (KERNEL_HEIGHT * KERNEL_WIDTH)
    is_here = is_run[:, None] & (channel < image_channels)[None, :]  # also where the weight has none
    zeros = tl.zeros((TILE_RUNS, TILE_CHANNELS), tl.float32)
    totals = (zeros, zeros, zeros, zeros)
    for i in tl.static_range(KERNEL_HEIGHT):
        row = y + i * DILATION_Y
        in_rows = is_here & _is_within(row, height)[:, None]
        for j in tl.static_range((RUN - 1) * STRIDE_X + (KERNEL_WIDTH - 1) * DILATION_X + 1):
            value = tl.load(values + j * image_channels, in_rows & _is_within(x + j, width)[:, None], 0.0)
            if IS_RELU:
                value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
            value = value.to(tl.float32)
            totals = (
                _add(totals[0], value, taps, is_channel, j, DILATION_X, KERNEL_WIDTH),
                _add(totals[1], value, taps, is_channel, j - STRIDE_X, DILATION_X, KERNEL_WIDTH),
                _add(totals[2], value, taps, is_channel, j - 2 * STRIDE_X, DILATION_X, KERNEL_WIDTH),
                _add(totals[3], value, taps, is_channel, j - 3 * STRIDE_X, DILATION_X, KERNEL_WIDTH),
            )
        values += DILATION_Y * width * image_channels
        taps += KERNEL_WIDTH
    place = ((line * out_width + out_x) * out_channels)[:, None] + channel[None, :]
    for k in tl.static_range(RUN):
        inside = (is_run & (out_x + k < out_width))[:, None] & (channel < out_channels)[None, :]
        total = tl.where(is_channel[None, :], totals[k], 0.0)
        tl.store(out + place + k * out_channels, total.to(out.dtype.element_ty), inside)


@triton.jit
def _is_within(at, size):
    """Whether ``at`` is from zero up to ``size``, in one comparison: without a sign, what is below is very large."""
    return at.to(tl.uint32) < size.to(tl.uint32)


@triton.jit
def _add(total, value, taps, is_channel, j: tl.constexpr, DILATION: tl.constexpr, WIDTH: tl.constexpr):
    """Add what a column, the ``j``-th of those that a pixel's window covers or leaves out, gives to that pixel."""
    if j >= 0 and j % DILATION == 0 and j // DILATION < WIDTH:
        tap = tl.load(taps + j // DILATION, is_channel, 0.0)
        total += value * tap.to(tl.float32)[None, :]
    return total
