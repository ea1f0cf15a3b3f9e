"""The Triton kernel of ``dense`` for a few results of medium sums, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

from millstream.lower.convolutions.dense_kernel import ANY, choose, finish, load_added


@triton.jit(do_not_specialize=ANY)
def dense_at_once(
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
    pad_y,
    pad_x,
    stride_y,
    stride_x,
    is_early,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KEPT_AT_ONCE: tl.constexpr,
    TILE_PIXELS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Do what the kernel ``dense`` does, but ask for all numbers at once, and divide each sum among groups of threads.

    ``dense`` goes through a sum in steps, and each of them takes as long as a few instructions that wait for each
    other. Where a device has more multiprocessors than there is work for, these are the time it takes.

    Args:
        is_early: Whether weights may be read before the kernel in front has ended.
        ROW: Of the window, columns and their channels.
        ROWS: Of the window.
        STEPS: In which all groups go through the window.
        GROUPS: Of threads, a warp each.
        images, weights, biases, addends, outs, num_pixels, height, width, out_height, out_width, inputs, outputs,
            out_channels, kept, bias_width, addend_width, num_added, lowest, pad_y, pad_x, stride_y, stride_x,
            HAS_ADDEND, AT_ONCE, KEPT_AT_ONCE, TILE_PIXELS, TILE_CHANNELS, TILE_DEPTH, STARTS_EARLY: As ``dense``
            takes them.
    """
    which = tl.program_id(2)
    image, weight, out = choose(images, which), choose(weights, which), choose(outs, which)
    inputs *= AT_ONCE
    outputs *= AT_ONCE
    kept *= KEPT_AT_ONCE
    bias_width *= KEPT_AT_ONCE
    out_channels *= AT_ONCE
    addend_width *= AT_ONCE
    pixel = tl.program_id(0) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_pixel, is_channel = pixel < num_pixels, channel < outputs
    line = pixel // out_width
    y = line % out_height * stride_y - pad_y
    x = ((pixel - line * out_width) * stride_x - pad_x) * inputs
    corner = (line // out_height * height + y) * width * inputs + x
    group = tl.arange(0, GROUPS)[:, None, None] * TILE_DEPTH
    depth = tl.arange(0, TILE_DEPTH)
    length: tl.constexpr = ROW * ROWS
    if STARTS_EARLY:  # noqa: SIM102  known when it is compiled, the other is not
        if is_early == 0:
            gdc_wait()
    taps = ()
    for step in tl.static_range(STEPS):
        place = step * GROUPS * TILE_DEPTH + group + depth[None, :, None]
        is_tap = (place < length) & is_channel[None, None, :]
        taps += (tl.load(weight + channel[None, None, :] * length + place, is_tap, 0.0),)
    if STARTS_EARLY:
        gdc_wait()
    shift, other = load_added(
        biases, addends, which, pixel, channel, is_pixel, bias_width, addend_width, num_added, HAS_ADDEND
    )
    values = ()
    for step in tl.static_range(STEPS):
        place = step * GROUPS * TILE_DEPTH + group + depth[None, None, :]
        i = place // ROW
        along = place - i * ROW
        row = y[None, :, None] + i
        column = x[None, :, None] + along
        is_value = (row >= 0) & (row < height) & (column >= 0) & (column < width * inputs)
        is_value &= is_pixel[None, :, None] & (place < length)
        values += (tl.load(image + corner[None, :, None] + i * (width * inputs) + along, is_value, 0.0),)
    totals = tl.zeros((GROUPS, TILE_PIXELS, TILE_CHANNELS), tl.float32)
    for step in tl.static_range(STEPS):
        totals = tl.dot(values[step], taps[step], totals)
    if STARTS_EARLY:
        gdc_launch_dependents()
    total = finish(tl.sum(totals, 0), shift, other, channel, lowest, kept, HAS_ADDEND)
    place = (pixel * out_channels)[:, None] + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_pixel[:, None] & is_channel[None, :])
