"""The Triton kernel of ``conv2d``, apart from it because Triton is not everywhere."""

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
    "num_added",
    "lowest",
    "row",
    "rows",
    "pad_y",
    "pad_x",
    "stride_y",
    "stride_x",
    "steps",
    "steps_a_row",
    "steps_a_split",
    "num_splits",
]


@triton.jit(do_not_specialize=_ANY)
def conv2d(
    images,
    weights,
    biases,
    addends,
    outs,
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
    num_added,
    lowest,
    row,
    rows,
    pad_y,
    pad_x,
    stride_y,
    stride_x,
    steps,
    steps_a_row,
    steps_a_split,
    num_splits,
    IS_POINTWISE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KEPT_AT_ONCE: tl.constexpr,
    TILE_PIXELS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    IS_HALVED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Convolve images with windows over all of their channels, each image with windows of its own.

    All have the same sizes. The last direction of the grid says which of them a block works on.

    The columns of a window's row and their channels lie one after the other, in the image as in the weight. So each
    row is a product of matrices, however wide it is, and only what lies beyond the image's sides must be left out.

    Args:
        images: Each in memory: images of a batch, rows, columns, channels.
        weights: Each in memory: channels of the result, rows, columns, channels of the image.
        biases: For each channel that is kept, if any. They are rounded to the type of the results.
        addends: Like ``images``, but of their own number of channels.
        outs: Like ``images``, but with ``out_channels`` in memory for each pixel, of which ``outputs`` are written.
        num_pixels: Of each result, of all images of the batch.
        inputs: Channels of an image, in units of ``AT_ONCE``; so are ``outputs``, ``addend_width``,
            ``out_channels`` and a ``row``.
        kept: How many channels of a result are computed, in units of ``KEPT_AT_ONCE``; the others are set to zero.
        bias_width: As many as are kept, or 0.
        num_added: How many have an addend; they come first.
        lowest: What smaller sums are set to: zero for relu, or minus infinity.
        rows: Of the window.
        steps: How many tiles deep the products are, in all rows of the window.
        steps_a_row: In one of them.
        steps_a_split: In all splits of a sum but the last, which may have fewer.
        num_splits: Of each sum. Partial sums of a convolution lie split by split in ``outs``, each like a result.
        IS_POINTWISE: Whether the window is one pixel, and each pixel has one.
        IS_WHOLE: Whether tiles end where rows end.
        HAS_ADDEND: Whether any has an addend. Without it, numbers need not change between threads on the way.
        IS_HALVED: Whether a tile's products are summed in two halves, of which neither waits for the other.
        IS_SPLIT: Whether each sum is split among blocks; ``reduce_partials`` has to follow.
        STARTS_EARLY: Whether to start before the kernel in front has ended (``launches.py``).
    """
    which = tl.program_id(2)
    split = 0
    if IS_SPLIT:
        split = which % num_splits
        which = which // num_splits
    image, weight, out = choose(images, which), choose(weights, which), choose(outs, which)
    inputs *= AT_ONCE
    outputs *= AT_ONCE
    kept *= KEPT_AT_ONCE
    bias_width *= KEPT_AT_ONCE
    out_channels *= AT_ONCE
    addend_width *= AT_ONCE
    row *= AT_ONCE
    pixel = tl.program_id(0) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    half_depth: tl.constexpr = TILE_DEPTH // 2 if IS_HALVED else TILE_DEPTH
    depth = tl.arange(0, half_depth)
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
        y = tl.where(is_pixel, y, -(1 << 30))  # outside of any image: one comparison less in each step
    line_length = width * inputs
    taps = weight + channel[None, :] * (rows * row) + depth[:, None]
    if STARTS_EARLY:
        gdc_wait()
    # What is added in the end is on its way from here on.
    shift, other = _load_added(
        biases, addends, which, pixel, channel, is_pixel, bias_width, addend_width, num_added, HAS_ADDEND
    )
    total = tl.zeros((TILE_PIXELS, TILE_CHANNELS), tl.float32)
    half = total
    i = 0
    first = 0
    if IS_SPLIT:
        step = split * steps_a_split
        i = step // steps_a_row
        first = step % steps_a_row * TILE_DEPTH
        steps = min(steps_a_split, steps - step)
    for _ in range(steps):
        is_row = is_pixel
        if not IS_POINTWISE:
            is_row = (y + i).to(tl.uint32, bitcast=True) < height  # what is negative is beyond it, too
        total = _add_products(
            total, values, taps, i * line_length, i * row, first, depth, x, is_row, is_channel, row, line_length,
            IS_POINTWISE, IS_WHOLE,
        )  # fmt: skip
        if IS_HALVED:
            half = _add_products(
                half, values, taps, i * line_length, i * row, first + half_depth, depth, x, is_row, is_channel, row,
                line_length, IS_POINTWISE, IS_WHOLE,
            )  # fmt: skip
        first += TILE_DEPTH
        if not IS_POINTWISE:
            i = tl.where(first < row, i, i + 1)
            first = tl.where(first < row, first, 0)
    if STARTS_EARLY:
        gdc_launch_dependents()
    if IS_HALVED:
        total += half
    total = _finish(total, shift, other, channel, lowest, kept, HAS_ADDEND)
    place = ((split * num_pixels + pixel) * out_channels)[:, None] + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_pixel[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=_ANY)
def reduce_partials(
    partials,
    biases,
    addends,
    outs,
    num_pixels,
    outputs,
    out_channels,
    kept,
    bias_width,
    addend_width,
    num_added,
    lowest,
    NUM_SPLITS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KEPT_AT_ONCE: tl.constexpr,
    TILE_PIXELS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Add up, in their order, the partial sums that ``conv2d`` has left, and do what it does after its products.

    Args:
        partials: For each convolution in memory: splits, pixels, channels.
        NUM_SPLITS: Of each sum.
        biases, addends, outs, num_pixels, outputs, out_channels, kept, bias_width, addend_width, num_added, lowest,
            HAS_ADDEND, AT_ONCE, KEPT_AT_ONCE, TILE_PIXELS, TILE_CHANNELS, STARTS_EARLY: As ``conv2d`` takes them.
    """
    which = tl.program_id(2)
    outputs *= AT_ONCE
    kept *= KEPT_AT_ONCE
    bias_width *= KEPT_AT_ONCE
    out_channels *= AT_ONCE
    addend_width *= AT_ONCE
    pixel = tl.program_id(0) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_pixel, is_channel = pixel < num_pixels, channel < outputs
    is_result = is_pixel[:, None] & is_channel[None, :]
    partial = choose(partials, which) + (pixel * outputs)[:, None] + channel[None, :]
    out = choose(outs, which) + (pixel * out_channels)[:, None] + channel[None, :]
    if STARTS_EARLY:
        gdc_wait()
    shift, other = _load_added(
        biases, addends, which, pixel, channel, is_pixel, bias_width, addend_width, num_added, HAS_ADDEND
    )
    total = tl.load(partial, is_result, 0.0)
    for k in tl.static_range(1, NUM_SPLITS):
        total += tl.load(partial + k * num_pixels * outputs, is_result, 0.0)
    if STARTS_EARLY:
        gdc_launch_dependents()
    total = _finish(total, shift, other, channel, lowest, kept, HAS_ADDEND)
    tl.store(out, total.to(out.dtype.element_ty), is_result)


@triton.jit
def choose(pointers, which):
    """One of several pointers. A block does so once; a table of them in memory would have to be written first."""
    pointer = pointers[0]
    for k in tl.static_range(1, len(pointers)):
        pointer = tl.where(which == k, pointers[k], pointer)
    return pointer


@triton.jit
def _add_products(
    total, values, taps, in_image, in_weight, first, depth, x, is_row, is_channel, row, width,
    IS_POINTWISE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the products of a part of the window's row, from ``first`` on, if the image has it."""
    is_value = is_row[:, None]
    is_tap = is_channel[None, :]
    if not IS_POINTWISE:
        column = x[:, None] + (first + depth)[None, :]
        is_value &= column.to(tl.uint32, bitcast=True) < width
    if not IS_WHOLE:
        inside = depth < row - first
        is_value &= inside[None, :]
        is_tap &= inside[:, None]
    return tl.dot(
        tl.load(values + (in_image + first), is_value, 0.0), tl.load(taps + (in_weight + first), is_tap, 0.0), total
    )


@triton.jit
def _load_added(
    biases, addends, which, pixel, channel, is_pixel, bias_width, addend_width, num_added, HAS_ADDEND: tl.constexpr
):
    """Bias and addend, or the bias twice; both of the addend's type, which is that of the result."""
    shift = tl.load(choose(biases, which) + channel, channel < bias_width, 0.0).to(addends[0].dtype.element_ty)
    other = shift
    if HAS_ADDEND:
        place = (pixel * addend_width)[:, None] + channel[None, :]
        is_added = (channel < addend_width) & (which < num_added)
        other = tl.load(choose(addends, which) + place, is_pixel[:, None] & is_added[None, :], 0.0)
    return shift, other


@triton.jit
def _finish(total, shift, other, channel, lowest, kept, HAS_ADDEND: tl.constexpr):
    """Add what was loaded, apply relu, and set to zero what is not kept."""
    total += shift.to(tl.float32)[None, :]
    if HAS_ADDEND:
        total += other.to(tl.float32)
    total = tl.maximum(total, lowest, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((channel < kept)[None, :], total, 0.0)
