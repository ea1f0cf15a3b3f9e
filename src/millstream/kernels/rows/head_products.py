"""The product that gives the queries, keys and values of a token, rotated and written where attention reads them.

Between such a product and attention stands a kernel of next to no work: it rotates queries and keys by the angles of
their position (Su et al., "RoFormer", 2021), and writes keys and values into a cache. Every other kernel of a layer is
ours and starts early; this one is waited for. Here the blocks of the product do both. Queries, keys and values may have
a weight each: blocks are divided among them, so that three products are one kernel.

Sums are in single precision, as is the rotation, whose result is rounded once.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from millstream.graph import KernelKind
from millstream.kernels.conv2d.conv2d_tiles import ceil_div
from millstream.kernels.early_loads import may_load_early
from millstream.kernels.family import NodeWriter
from millstream.kernels.launches import TritonLaunch, dependent_launch_options
from millstream.kernels.nodes import arguments_of
from millstream.kernels.rows.row_products import MULTIPLY, NORMS, tiles_of

SIZES = (16, 32, 64, 128, 256)  # of a head
LONGEST = 8192
"""Of a row: of 16384 numbers, ptxas spills (Triton 3.6, sm_90)."""
_CHECKED = {"debug": True, "sanitize_overflow": False}
"""Has a kernel fail where it would write outside of the cache, as Inductor's does."""
_NUM_WARPS = 4


class HeadProduct(NamedTuple):
    """A product of one row with the weights of queries, keys and values.

    Attributes:
        row: Contiguous, ``[1, length]``.
        query: Contiguous, ``[heads times size, length]``: a result is the row times one of its rows.
        key: Likewise, of as many heads as the cache has.
        value: Likewise.
        query_bias: Added to the results; all three have one, or none.
        key_bias: Likewise.
        value_bias: Likewise.
        scale: By which the row is multiplied after the norm.
        shift: Which is then added to it.
        cos: Contiguous: of half the size of a head, or of its whole size.
        sin: Likewise. Of a query or key, a pair ``x[i]``, ``y = x[i + size / 2]`` becomes ``x[i] * cos[i] - y *
            sin[i]``, ``y * cos[j] + x[i] * sin[j]``, where ``j`` is ``i + second``.
        position: One whole number, below 0 counted from the end.
        keys: ``[1, heads, room, size]``, each position without gaps: that at ``position`` is written.
        values: Likewise.
        norm: One of ``row_products.NORMS``.
        eps: Of the norm.
        second: Where the second half of a head begins in ``cos`` and ``sin``: 0 where both halves share them.
        is_constant: Whether no kernel of the program writes the weights.
        out: Contiguous, ``[1, heads times size]``: the queries.
    """

    row: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_bias: torch.Tensor | None
    key_bias: torch.Tensor | None
    value_bias: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    norm: str
    eps: float
    second: int
    is_constant: bool
    out: torch.Tensor


def multiply_heads(*arguments: Any, out: torch.Tensor) -> None:
    """Compute what ``HeadProduct`` says."""
    launch_heads(HeadProduct(*arguments, out=out)).run()


def launch_heads(product: HeadProduct) -> TritonLaunch:
    """Return how to compute a product."""
    from millstream.kernels.rows.head_products_kernel import multiply_heads  # Triton is there where there is a GPU

    row, query, key, value = product[:4]
    (width, length), size = query.shape, product.keys.shape[3]
    tile_width, tile_length = tiles_of(1, width, length, has_gate=True)  # the halves of a head as a factor and its gate
    is_early = product.is_constant and all(map(may_load_early, (query, key, value)))
    arguments = (
        *(row if each is None else each for each in product[:14]),
        product.out,
        *product.keys.stride()[1:3],
        *product.values.stride()[1:3],
        product.keys.shape[2],
        0 if is_early else 2,
        product.eps,
    )
    constants = {
        "LENGTH": length,
        "QUERIES": width // size,
        "KEYS": key.shape[0] // size,
        "SIZE": size,
        "SECOND": product.second,
        "NORM": NORMS.index(product.norm),
        "HAS_BIAS": product.query_bias is not None,
        "HAS_SCALE": product.scale is not None,
        "HAS_SHIFT": product.shift is not None,
        "TILE_WIDTH": tile_width,
        "TILE_LENGTH": tile_length,
        "NUM_TILES": ceil_div(length, tile_length),
        "IS_WHOLE": length % tile_length == 0,
        **dependent_launch_options(row.device),
        **_CHECKED,
        "num_warps": _NUM_WARPS,
    }
    num_blocks = (width + key.shape[0] + value.shape[0]) // 2 // tile_width
    return TritonLaunch(multiply_heads, (num_blocks, 1, 1), arguments, constants)


_library = torch.library.Library("millstream", "FRAGMENT")
_library.define(
    "multiply_heads(Tensor row, Tensor query, Tensor key, Tensor value, Tensor? query_bias, Tensor? key_bias, "
    "Tensor? value_bias, Tensor? scale, Tensor? shift, Tensor cos, Tensor sin, Tensor position, Tensor(a!) keys, "
    "Tensor(b!) values, str norm, float eps, int second, bool is_constant, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # without it, Inductor makes a copy of angles for each layer
)
MULTIPLY_HEADS = torch.ops.millstream.multiply_heads.default


@torch.library.impl(_library, "multiply_heads", "CompositeExplicitAutograd")
def _multiply_heads(*arguments: Any) -> torch.Tensor:
    """Compute what the operator means; programs call ``multiply_heads`` in its place."""
    *given, dtype = arguments
    product = HeadProduct(*given, out=given[0])
    size, exact = product.keys.shape[3], torch.promote_types(given[0].dtype, torch.float32)
    norm = (product.scale, product.shift, None, product.norm, product.eps, "", False, exact)
    query, key, value = (
        MULTIPLY(product.row, weight, None, bias, *norm).view(-1, 2, size // 2)
        for weight, bias in zip(product[1:4], product[4:7], strict=True)
    )
    first, second = slice(size // 2), slice(product.second, product.second + size // 2)
    cos, sin = product.cos.flatten().to(exact), product.sin.flatten().to(exact)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x[:, 0], x[:, 1]
        return torch.cat([left * cos[first] - right * sin[first], right * cos[second] + left * sin[second]], 1)

    position = torch.where(product.position < 0, product.position + product.keys.shape[2], product.position).view(1)
    for cache, new in ((product.keys, rotated(key)), (product.values, value)):
        cache.index_copy_(2, position.long(), new.reshape(1, -1, 1, size).to(cache.dtype))
    return rotated(query).reshape(1, -1).to(dtype)


@torch.library.register_fake("millstream::multiply_heads", lib=_library)
def _(row: torch.Tensor, query: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.empty(1, query.shape[0], dtype=options[-1], device=row.device)


@register_flop_formula(MULTIPLY_HEADS.overloadpacket)
def _count_flops(_: list[int], query: list[int], key: list[int], value: list[int], **__: Any) -> int:
    return 2 * (math.prod(query) + math.prod(key) + math.prod(value))


def bind_heads(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a product of a row that gives queries, keys and values."""
    if node.target is not MULTIPLY_HEADS:
        return None
    *arguments, _ = arguments_of(node)
    product = HeadProduct(*arguments, out=node)  # type: ignore[arg-type]
    name = multiply_heads.__name__ + (f" with {product.norm} norm" if product.norm else "")
    ops = (*[f"{product.norm}_norm"] * bool(product.norm), "linear", "rotary_embedding", "index_copy")
    tensors = tuple(each for each in product[:12] if isinstance(each, torch.fx.Node))
    return NodeWriter(multiply_heads, tuple(arguments), name, KernelKind.GEMM, ops, contiguous=tensors)
