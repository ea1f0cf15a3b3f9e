"""The Triton kernel of ``products``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra.cuda import (  # pyrefly: ignore[missing-import]
    gdc_launch_dependents,
    gdc_wait,
)
from triton.language.extra.libdevice import tanh  # pyrefly: ignore[missing-import]


@triton.jit(do_not_specialize=["waits_first"])
def multiply(
    rows,
    weight,
    gate,
    bias,
    scale,
    shift,
    addend,
    out,
    waits_first,
    eps,
    NUM_ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_LENGTH: tl.constexpr,
    NUM_TILES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Write what ``RowProduct`` says: a block has some results of each row, and all that they are sums of.

    It asks for its part of the weight first, all of it at once, and for this alone does not wait for the kernel in
    front, unless ``waits_first`` is not 0: the time in which memory answers is the time in which that kernel ends.

    Args:
        NUM_ROWS: Of rows, each of ``LENGTH`` numbers; ``WIDTH`` is how many results a row has.
        NORM: 0 none, 1 by the root of the mean square, 2 by mean and variance.
        ACTIVATION: 0 none, 1 SiLU, 2 GELU, 3 its approximation by tanh, 4 ReLU.
        NUM_TILES: Of ``TILE_LENGTH`` numbers, that a row has.
        IS_WHOLE: Whether tiles divide the weight.
    """
    if STARTS_EARLY:
        _wait_if(waits_first)
    n = tl.program_id(0) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    is_inside = n < WIDTH
    k = tl.arange(0, TILE_LENGTH)
    first = ()
    second = ()
    for i in tl.static_range(NUM_TILES):
        first = first + (_part_of(weight, n, i * TILE_LENGTH + k, LENGTH, WIDTH, IS_WHOLE),)
        if HAS_GATE:
            second = second + (_part_of(gate, n, i * TILE_LENGTH + k, LENGTH, WIDTH, IS_WHOLE),)
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for m in tl.static_range(NUM_ROWS):
        mean, factor = _norm_of(rows + m * LENGTH, eps, LENGTH, NORM, TILE_LENGTH, NUM_TILES)
        total = tl.zeros([TILE_WIDTH], tl.float32)
        gated = tl.zeros([TILE_WIDTH], tl.float32)
        for i in tl.static_range(NUM_TILES):
            at = i * TILE_LENGTH + k
            x = (tl.load(rows + m * LENGTH + at, at < LENGTH, 0.0).to(tl.float32) - mean) * factor
            if HAS_SCALE:
                x = x * tl.load(scale + at, at < LENGTH, 0.0).to(tl.float32)
            if HAS_SHIFT:
                x = x + tl.load(shift + at, at < LENGTH, 0.0).to(tl.float32)
            total += tl.sum(first[i].to(tl.float32) * x[None, :], 1)
            if HAS_GATE:
                gated += tl.sum(second[i].to(tl.float32) * x[None, :], 1)
        if HAS_BIAS:
            total += tl.load(bias + n, is_inside, 0.0).to(tl.float32)
        total = _activate(gated, ACTIVATION) * total if HAS_GATE else _activate(total, ACTIVATION)
        if HAS_ADDEND:
            total += tl.load(addend + m * WIDTH + n, is_inside, 0.0).to(tl.float32)
        tl.store(out + m * WIDTH + n, total.to(out.dtype.element_ty), is_inside)


@triton.jit
def _wait_if(waits_first):
    if waits_first != 0:
        gdc_wait()


@triton.jit
def _part_of(weight, n, k, LENGTH: tl.constexpr, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Ask for a part of a weight, which is read but once; ``IS_WHOLE``: all of it is there."""
    place = n[:, None] * LENGTH + k[None, :]
    if IS_WHOLE:
        return tl.load(weight + place, eviction_policy="evict_first")
    is_inside = (n < WIDTH)[:, None] & (k < LENGTH)[None, :]
    return tl.load(weight + place, is_inside, 0.0, eviction_policy="evict_first")


@triton.jit
def _norm_of(row, eps, LENGTH: tl.constexpr, NORM: tl.constexpr, TILE_LENGTH: tl.constexpr, NUM_TILES: tl.constexpr):
    """Return what is taken from a row, and what it is multiplied by then."""
    mean = 0.0
    factor = 1.0
    k = tl.arange(0, TILE_LENGTH)
    if NORM == 2:
        for i in tl.static_range(NUM_TILES):
            at = i * TILE_LENGTH + k
            mean += tl.sum(tl.load(row + at, at < LENGTH, 0.0).to(tl.float32))
        mean /= LENGTH
    if NORM != 0:
        square = 0.0
        for i in tl.static_range(NUM_TILES):
            at = i * TILE_LENGTH + k
            x = tl.load(row + at, at < LENGTH, 0.0).to(tl.float32) - mean
            square += tl.sum(tl.where(at < LENGTH, x * x, 0.0))
        factor = tl.rsqrt(square / LENGTH + eps)
    return mean, factor


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        return x * tl.sigmoid(x)
    if ACTIVATION == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == 3:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == 4:
        return tl.where(x < 0.0, 0.0, x)
    return x
