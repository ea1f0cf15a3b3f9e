"""The Triton kernel of ``weights``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

from millstream.kernels.conv2d.conv2d_kernel import choose


@triton.jit
def convert(
    weights,
    outs,
    firsts,
    outputs,
    inputs,
    out_outputs,
    out_inputs,
    NUM_TAPS: tl.constexpr,
    IS_LAST: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    TILE_TAPS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write weights of convolutions with their channels last, and zeros after these.

    A tile has some *pairs* of a channel of the result and one of the image, and the taps of their windows. All numbers
    come as ``2 n + 3``.

    Args:
        weights: Each in memory: channels of the result, channels of the image, taps of the window.
        outs: Each in memory: channels of the result, taps, channels of the image.
        firsts: The tile with which each begins.
        outputs: Channels of the result that a weight has, and those of the image are its ``inputs``.
        out_outputs: The same of what is written; ``out_inputs`` in units of ``AT_ONCE``.
        NUM_TAPS: Of all windows.
        IS_LAST: Whether the weights have their channels last already.
        IS_WIDENED: Whether any weight has fewer channels than what is written.
        STARTS_EARLY: Whether to start before the kernel in front has ended (``launches.py``).
    """
    tile = tl.program_id(0)
    which = 0
    for k in tl.static_range(1, len(firsts)):
        which += (tile >= _number(firsts[k])).to(tl.int32)
    weight, out = choose(weights, which), choose(outs, which)
    out_outputs = _number(choose(out_outputs, which))
    out_inputs = _number(choose(out_inputs, which)) * AT_ONCE
    tile -= _number(choose(firsts, which))
    tiles_a_row = tl.cdiv(out_inputs, TILE_INPUTS)
    pair = tl.arange(0, TILE_OUTPUTS * TILE_INPUTS)
    result = tile // tiles_a_row * TILE_OUTPUTS + pair // TILE_INPUTS
    channel = tile % tiles_a_row * TILE_INPUTS + pair % TILE_INPUTS
    is_pair = (result < out_outputs) & (channel < out_inputs)
    width, is_given = out_inputs, is_pair
    if IS_WIDENED:
        width = _number(choose(inputs, which))
        is_given = (result < _number(choose(outputs, which))) & (channel < width)
    if STARTS_EARLY:
        gdc_wait()
    for first in tl.static_range(0, NUM_TAPS, TILE_TAPS):
        tap = first + tl.arange(0, TILE_TAPS)
        is_tap = tap < NUM_TAPS
        if IS_LAST:
            place = (result * (NUM_TAPS * width) + channel)[:, None] + (tap * width)[None, :]
        else:
            place = ((result * width + channel) * NUM_TAPS)[:, None] + tap[None, :]
        value = tl.load(weight + place, is_given[:, None] & is_tap[None, :], 0.0)
        place = (result * (NUM_TAPS * out_inputs) + channel)[:, None] + (tap * out_inputs)[None, :]
        tl.store(out + place, value.to(out.dtype.element_ty), is_pair[:, None] & is_tap[None, :])
    if STARTS_EARLY:
        gdc_launch_dependents()


@triton.jit
def _number(given):
    return (given - 3) >> 1
