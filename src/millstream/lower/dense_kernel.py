"""The Triton kernel of ``dense``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

# Compiled for each tile, not for each size of image or window, nor for what follows.
_ANY = [
    "num_pixels",
    "height",
    "width",
    "out_height",
    "out_width",
    "inputs",
    "outputs",
    "out_channels",
    "kept",
    "bias_width",
    "addend_width",
    "lowest",
    "row",
    "rows",
    "pad_y",
    "pad_x",
    "stride_y",
    "stride_x",
    "steps",
]


@triton.jit(do_not_specialize=_ANY)
def dense(
    image,
    weight,
    bias,
    addend,
    out,
    num_pixels,
    height,
    width,
    out_height,
    out_width,
    inputs,
    outputs,
    out_channels,
    kept,
    bias_width,
    addend_width,
    lowest,
    row,
    rows,
    pad_y,
    pad_x,
    stride_y,
    stride_x,
    steps,
    IS_POINTWISE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KEPT_AT_ONCE: tl.constexpr,
    TILE_PIXELS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    IS_HALVED: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Convolve an image with windows over all of its channels.

    The columns of a window's row and their channels lie one behind the other, in the image as in the weight. So each
    row is a product of matrices, however wide it is, and only what lies beyond the image's sides must be left out.

    Args:
        image: In memory: images, rows, columns, channels.
        weight: In memory: channels of ``out``, rows, columns, channels of ``image``.
        bias: For each channel that is kept, if any.
        addend: Like ``image``, but of its own number of channels.
        out: Like ``image``, but with ``out_channels`` in memory for each pixel, of which ``outputs`` are written.
        num_pixels: Of ``out``, of all its images.
        inputs: Channels of ``image``, in units of ``AT_ONCE``; so are ``outputs``, ``addend_width``,
            ``out_channels`` and a ``row``.
        kept: How many channels of ``out`` are computed, in units of ``KEPT_AT_ONCE``; the others are set to zero.
        bias_width: As many as are kept, or 0.
        lowest: What smaller sums are set to: zero for relu, or minus infinity.
        rows: Of the window.
        steps: How many tiles deep the products are, in all rows of the window.
        IS_POINTWISE: Whether the window is one pixel, and each pixel has one.
        IS_WHOLE: Whether tiles end where rows end.
        HAS_ADDEND: Whether to add ``addend``. Without it, numbers need not change between threads on the way.
        IS_HALVED: Whether a tile's products are summed in two halves, of which neither waits for the other.
        STARTS_EARLY: Whether to start before the kernel in front has ended (``early.py``).
    """
    inputs *= AT_ONCE
    outputs *= AT_ONCE
    kept *= KEPT_AT_ONCE
    bias_width *= KEPT_AT_ONCE
    out_channels *= AT_ONCE
    addend_width *= AT_ONCE
    row *= AT_ONCE
    pixel = tl.program_id(0) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    part: tl.constexpr = TILE_DEPTH // 2 if IS_HALVED else TILE_DEPTH
    depth = tl.arange(0, part)
    is_pixel, is_channel = pixel < num_pixels, channel < outputs
    if IS_POINTWISE:
        y = pixel
        x = pixel
        values = image + (pixel * inputs)[:, None] + depth[None, :]
    else:
        line = pixel // out_width
        y = line % out_height * stride_y - pad_y
        x = ((pixel - line * out_width) * stride_x - pad_x) * inputs
        values = image + ((line // out_height * height + y) * width * inputs + x)[:, None] + depth[None, :]
    taps = weight + channel[None, :] * (rows * row) + depth[:, None]
    if STARTS_EARLY:
        gdc_wait()
    # What is added in the end is on its way from here on.
    shift = tl.load(bias + channel, channel < bias_width, 0.0)
    if HAS_ADDEND:
        place = (pixel * addend_width)[:, None] + channel[None, :]
        other = tl.load(addend + place, is_pixel[:, None] & (channel < addend_width)[None, :], 0.0)
    total = tl.zeros((TILE_PIXELS, TILE_CHANNELS), tl.float32)
    half = total
    i = 0
    first = 0
    for _ in range(steps):
        is_row = is_pixel
        if not IS_POINTWISE:
            is_row &= (y + i >= 0) & (y + i < height)
        in_row = i * width * inputs
        total = _add_products(
            total, values + in_row, taps + i * row, first, depth, x, is_row, is_channel, row, width * inputs,
            IS_POINTWISE, IS_WHOLE,
        )  # fmt: skip
        if IS_HALVED:
            half = _add_products(
                half, values + in_row, taps + i * row, first + part, depth, x, is_row, is_channel, row, width * inputs,
                IS_POINTWISE, IS_WHOLE,
            )  # fmt: skip
        first += TILE_DEPTH
        if not IS_POINTWISE:
            i = tl.where(first < row, i, i + 1)
            first = tl.where(first < row, first, 0)
    if STARTS_EARLY:
        gdc_launch_dependents()
    if IS_HALVED:
        total += half
    total += shift.to(tl.float32)[None, :]
    if HAS_ADDEND:
        total += other.to(tl.float32)  # pyrefly: ignore[unbound-name]
    total = tl.maximum(total, lowest, propagate_nan=tl.PropagateNan.ALL)
    total = tl.where((channel < kept)[None, :], total, 0.0)
    place = (pixel * out_channels)[:, None] + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_pixel[:, None] & is_channel[None, :])


@triton.jit
def _add_products(
    total, values, taps, first, depth, x, is_row, is_channel, row, width,
    IS_POINTWISE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the products of a part of the window's row, from ``first`` on, if the image has it."""
    is_value = is_row[:, None]
    is_tap = is_channel[None, :]
    if not IS_POINTWISE:
        column = x[:, None] + (first + depth)[None, :]
        is_value &= (column >= 0) & (column < width)
    if not IS_WHOLE:
        inside = depth < row - first
        is_value &= inside[None, :]
        is_tap &= inside[:, None]
    return tl.dot(tl.load(values + first, is_value, 0.0), tl.load(taps + first, is_tap, 0.0), total)
