"""The Triton kernels of ``attention``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit
def attend(
    q,
    k,
    v,
    mask,
    out,
    scale,
    length,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    heads,
    tiles,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PARTS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write what a part of the keys gives for the queries of all heads that share them, see ``AttentionPart``.

    Args:
        length: How many keys there are; ``tiles`` times ``TILE`` of them are a part.
        heads: Of keys.
        GROUP: Heads of queries for each.
        NUM_ROWS: Queries of a head.
        ROWS: Room for the queries of a group, a multiple of 16.
        SIZE: Of a head.
        COLUMNS: Of a row that is written: the sum of values, the largest product and the sum of weights.
        PARTS: Into how many the keys are divided.
    """
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    query = row % NUM_ROWS
    query_head = head * GROUP + row // NUM_ROWS
    is_row = row < GROUP * NUM_ROWS
    place = batch * q_batch + query_head * q_head + query * q_row
    queries = tl.load(q + place[:, None] + d[None, :], is_row[:, None], 0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, SIZE], tl.float32)
    for i in range(tiles):
        column = (part * tiles + i) * TILE + tl.arange(0, TILE)
        is_key = column < length
        key = tl.load(k + batch * k_batch + head * k_head + column[:, None] * k_row + d[None, :], is_key[:, None], 0.0)
        value = tl.load(
            v + batch * v_batch + head * v_head + column[:, None] * v_row + d[None, :], is_key[:, None], 0.0
        )
        product = tl.dot(queries, tl.trans(key)) * scale
        if HAS_MASK:
            place = batch * mask_batch + query_head * mask_head + query * mask_row
            added = tl.load(
                mask + place[:, None] + (column * mask_column)[None, :], is_row[:, None] & is_key[None, :], 0.0
            )
            product += added.to(tl.float32)
        product = tl.where(is_key[None, :], product * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(largest, tl.max(product, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row whose keys are all masked so far
        shrunk = tl.exp2(largest - base)
        weights = tl.exp2(product - base[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        values = values * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = higher
    place = ((tl.program_id(0) * PARTS + part) * ROWS + row) * COLUMNS
    tl.store(out + place[:, None] + d[None, :], values, is_row[:, None])
    tl.store(out + place + SIZE, largest, is_row)
    tl.store(out + place + SIZE + 1, total, is_row)


@triton.jit
def join_attention(
    parts,
    out,
    num_parts,
    heads,
    out_batch,
    out_head,
    out_row,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write the results of attention, of which ``attend`` has written parts: a block has those of one query."""
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, SIZE)
    is_part = part < num_parts
    place = ((tl.program_id(0) * num_parts + part) * ROWS + row) * COLUMNS
    values = tl.load(parts + place[:, None] + d[None, :], is_part[:, None], 0.0)
    largest = tl.load(parts + place + SIZE, is_part, float("-inf"))
    total = tl.load(parts + place + SIZE + 1, is_part, 0.0)
    highest = tl.max(largest, 0)
    factor = tl.exp2(largest - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(total * factor, 0)
    result = tl.sum(values * factor[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    head = tl.program_id(0) % heads * GROUP + row // NUM_ROWS
    place = tl.program_id(0) // heads * out_batch + head * out_head + row % NUM_ROWS * out_row
    tl.store(out + place + d, result.to(out.dtype.element_ty))
