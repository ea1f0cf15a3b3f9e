"""The Triton kernel of ``head_products``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

from millstream.kernels.rows.row_products_kernel import _norm_of, _part_of, _wait_if


@triton.jit(do_not_specialize=["waits_first"])
def multiply_heads(
    row,
    query,
    key,
    value,
    query_bias,
    key_bias,
    value_bias,
    scale,
    shift,
    cos,
    sin,
    position,
    keys,
    values,
    out,
    keys_head,
    keys_row,
    values_head,
    values_row,
    room,
    waits_first,
    eps,
    LENGTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    SECOND: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_LENGTH: tl.constexpr,
    NUM_TILES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write what ``HeadProduct`` says: a block has some pairs of results of one head, which rotate together.

    It asks for its part of the weight before it waits, as ``multiply`` does.

    Args:
        keys_head: From one head to the next in ``keys``, and so on.
        room: How many positions ``keys`` and ``values`` have.
        LENGTH: Of the row.
        QUERIES: How many heads ``query`` has; ``KEYS``, how many ``key`` and ``value`` have each.
        SIZE: Of a head.
        SECOND: Where ``cos`` and ``sin`` have what belongs to the second half of a head.
        NORM: As of ``multiply``, like what follows.
        TILE_WIDTH: How many pairs a block has.
    """
    if STARTS_EARLY:
        _wait_if(waits_first)
    half: tl.constexpr = SIZE // 2
    blocks: tl.constexpr = half // TILE_WIDTH
    head = tl.program_id(0) // blocks
    is_query = head < QUERIES
    is_value = head >= QUERIES + KEYS
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    head -= tl.where(is_query, 0, tl.where(is_value, QUERIES + KEYS, QUERIES))
    d = tl.program_id(0) % blocks * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    n = head * SIZE + d
    k = tl.arange(0, TILE_LENGTH)
    width: tl.constexpr = (QUERIES + KEYS) * SIZE  # more than there are: a head is there or not
    weight = tl.where(is_query, query, tl.where(is_value, value, key))
    first = ()
    second = ()
    for i in tl.static_range(NUM_TILES):
        first = first + (_part_of(weight, n, i * TILE_LENGTH + k, LENGTH, width, IS_WHOLE),)
        second = second + (_part_of(weight, n + half, i * TILE_LENGTH + k, LENGTH, width, IS_WHOLE),)
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.load(position).to(tl.int64)  # asked for before the sums are computed, like angles
    cosines, sines = tl.load(cos + d).to(tl.float32), tl.load(sin + d).to(tl.float32)
    other_cosines, other_sines = tl.load(cos + SECOND + d).to(tl.float32), tl.load(sin + SECOND + d).to(tl.float32)
    mean, factor = _norm_of(row, eps, LENGTH, NORM, TILE_LENGTH, NUM_TILES)
    left = tl.zeros([TILE_WIDTH], tl.float32)
    right = tl.zeros([TILE_WIDTH], tl.float32)
    for i in tl.static_range(NUM_TILES):
        place = i * TILE_LENGTH + k
        x = (tl.load(row + place, place < LENGTH, 0.0).to(tl.float32) - mean) * factor
        if HAS_SCALE:
            x = x * tl.load(scale + place, place < LENGTH, 0.0).to(tl.float32)
        if HAS_SHIFT:
            x = x + tl.load(shift + place, place < LENGTH, 0.0).to(tl.float32)
        left += tl.sum(first[i].to(tl.float32) * x[None, :], 1)
        right += tl.sum(second[i].to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        bias = tl.where(is_query, query_bias, tl.where(is_value, value_bias, key_bias))
        left += tl.load(bias + n).to(tl.float32)
        right += tl.load(bias + n + half).to(tl.float32)
    x = left * cosines - right * sines
    y = right * other_cosines + left * other_sines
    at = tl.where(at < 0, at + room, at)
    tl.device_assert((at >= 0) & (at < room), "index out of bounds")
    in_keys = keys + head.to(tl.int64) * keys_head + at * keys_row + d
    in_values = values + head.to(tl.int64) * values_head + at * values_row + d
    _store_pair(out + n, half, x, y, is_query)
    _store_pair(in_keys, half, x, y, is_key)
    _store_pair(in_values, half, left, right, is_value)


@triton.jit
def _store_pair(place, HALF: tl.constexpr, x, y, is_there):
    """Write both halves of pairs, if at all."""
    mask = tl.full(x.shape, 1, tl.int1) & is_there
    tl.store(place, x.to(place.dtype.element_ty), mask)
    tl.store(place + HALF, y.to(place.dtype.element_ty), mask)
