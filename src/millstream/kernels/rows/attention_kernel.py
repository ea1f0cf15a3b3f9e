"""The Triton kernels of ``attention``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)

from millstream.kernels.rows.row_products_kernel import _wait_if


@triton.jit(do_not_specialize=["waits_first"])
def attend(
    q,
    k,
    v,
    mask,
    position,
    out,
    scale,
    waits_first,
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
    HAS_POSITION: tl.constexpr,
    PARTS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write what a part of the keys gives for the queries of all heads that share them, see ``AttentionPart``.

    Where it is known which key is new, it asks for the others before it waits for the kernel in front, unless
    ``waits_first`` is not 0.

    Args:
        length: How many keys there are; ``tiles`` times ``TILE`` of them are a part.
        heads: Of keys.
        GROUP: Heads of queries for each.
        NUM_ROWS: Queries of a head.
        ROWS: Room for the queries of a group, a multiple of 16.
        SIZE: Of a head.
        COLUMNS: Of a row that is written: the sum of values, the largest product and the sum of weights.
        HAS_POSITION: Whether that is known; then a part is one tile.
        PARTS: Into how many the keys are divided.
    """
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    query = row % NUM_ROWS
    query_head = head * GROUP + row // NUM_ROWS
    is_row = row < GROUP * NUM_ROWS
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    at = 0
    old_key = 0.0
    old_value = 0.0
    if HAS_POSITION:
        if STARTS_EARLY:
            _wait_if(waits_first)
        at = tl.load(position).to(tl.int32)
        at = tl.where(at < 0, at + length, at)
        column = part * TILE + tl.arange(0, TILE)
        is_old = (column < length) & (column != at)
        old_key = tl.load(k + column[:, None] * k_row + d[None, :], is_old[:, None], 0.0)
        old_value = tl.load(v + column[:, None] * v_row + d[None, :], is_old[:, None], 0.0)
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    place = batch * q_batch + query_head * q_head + query * q_row
    queries = tl.load(q + place[:, None] + d[None, :], is_row[:, None], 0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, SIZE], tl.float32)
    for i in range(tiles):
        column = (part * tiles + i) * TILE + tl.arange(0, TILE)
        is_key = column < length
        is_asked = is_key & (column == at) if HAS_POSITION else is_key
        key = tl.load(k + column[:, None] * k_row + d[None, :], is_asked[:, None], 0.0)
        value = tl.load(v + column[:, None] * v_row + d[None, :], is_asked[:, None], 0.0)
        added = 0.0
        if HAS_MASK:  # asked for before products are waited for
            place = batch * mask_batch + query_head * mask_head + query * mask_row
            added = tl.load(
                mask + place[:, None] + (column * mask_column)[None, :], is_row[:, None] & is_key[None, :], 0.0
            ).to(tl.float32)
        if HAS_POSITION:
            key = tl.where(is_asked[:, None], key, old_key)
            value = tl.where(is_asked[:, None], value, old_value)
        product = tl.dot(queries, tl.trans(key)) * scale
        if HAS_MASK:
            product += added
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


@triton.jit(do_not_specialize=["lets_first"])
def join_attention(
    parts,
    out,
    lets_first,
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
    """Write the results of attention, of which ``attend`` has written parts: a block has those of one query.

    Where ``lets_first`` is not 0, the next kernel starts before this one waits: it can ask for its weights while
    attention is computed, and waits for this kernel's end itself.
    """
    if STARTS_EARLY:
        _let_if(lets_first)
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


@triton.jit
def _let_if(lets_first):
    if lets_first != 0:
        gdc_launch_dependents()
