"""Attention of a few queries over many keys, by kernels of our own that divide the keys.

Libraries give a block of the device to all keys of a head: for one token of a text a few blocks read all the memory
that the keys take. Here each block has some keys of a head, for all queries that share them, and a second kernel joins
what they have found, as softmax allows (Dao et al., "Flash-Decoding", 2023). How keys are divided depends on sizes
alone, so that each run gives the same bits.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from millstream.graph import KernelKind
from millstream.kernels.conv2d.conv2d_tiles import ceil_div
from millstream.kernels.family import NodeWriter
from millstream.kernels.launches import TritonLaunch, dependent_launch_options
from millstream.kernels.nodes import arguments_of

MOST_QUERIES = 16
"""Of all heads that share keys: the least that a tensor core multiplies at once."""

FEWEST_KEYS = 128
SIZES = (16, 32, 64, 128, 256)  # of a head
DTYPES = (torch.float16, torch.bfloat16)
_TILES = (64, 32)  # keys that a block multiplies at once
_MANY_BLOCKS = 132  # an H200's multiprocessors
_ADDED_COLUMNS = 4  # of 4 bytes, 16 in all, of which two are used
_NUM_WARPS = 4


def is_split_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether our kernels can compute this attention, without a library's.

    Args:
        query: Of ``[batch, heads, queries, size]``, real or fake.
        key: Of ``[batch, heads of keys, keys, size]``.
        value: Likewise.
        mask: What is added to products, of ``[batch, heads, queries, keys]`` or of one for all of some of these.
    """
    if not query.dim() == key.dim() == 4 or key.shape != value.shape or query.shape[0] != key.shape[0]:
        return False
    heads, of_keys = query.shape[1], key.shape[1]
    return (
        query.dtype in DTYPES
        and query.dtype is key.dtype is value.dtype
        and query.shape[3] == key.shape[3] in SIZES
        and heads % of_keys == 0
        and heads // of_keys * query.shape[2] <= MOST_QUERIES
        and key.shape[2] >= FEWEST_KEYS
        and all(each.stride(3) == 1 for each in (query, key, value))
        and (mask is None or (mask.is_floating_point() and _fits(mask, (*query.shape[:3], key.shape[2]))))
    )


def _fits(mask: torch.Tensor, shape: Sequence[int]) -> bool:
    return mask.dim() == len(shape) and all(own in (1, size) for own, size in zip(mask.shape, shape, strict=True))


def num_parts(batch: int, heads: int, keys: int) -> int:
    """Into how many parts the keys of a head are divided."""
    tiles = ceil_div(keys, _tile(batch * heads, keys))
    each = ceil_div(tiles, ceil_div(2 * _MANY_BLOCKS, batch * heads))
    return ceil_div(tiles, each)


def _tile(heads: int, keys: int) -> int:
    return _TILES[heads * ceil_div(keys, _TILES[0]) < _MANY_BLOCKS]


class AttentionPart(NamedTuple):
    """What parts of the keys give.

    Attributes:
        query: As ``is_split_attention`` has it, like the others.
        key: Likewise.
        value: Likewise.
        mask: Likewise.
        scale: By which products are multiplied before the mask is added.
        out: Contiguous, in single precision: ``[batch times heads of keys, parts, queries of a group, columns]``. The
            columns are the sum of values, each by its weight, and after them the largest product, as an exponent of 2
            by which all weights are divided, and the sum of weights.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    out: torch.Tensor


def attend_parts(*arguments: Any, out: torch.Tensor) -> None:
    """Compute what ``AttentionPart`` says."""
    launch_parts(AttentionPart(*arguments, out=out)).run()


def launch_parts(part: AttentionPart) -> TritonLaunch:
    """Return how to compute the parts."""
    from millstream.kernels.rows.attention_kernel import attend  # Triton is there where there is a GPU

    query, key, value, mask, scale, out = part
    batch, heads, keys, _ = key.shape
    tile = _tile(batch * heads, keys)
    strides = [stride for each in (query, key, value) for stride in each.stride()[:3]]
    of_mask = [0] * 4 if mask is None else [s * (n > 1) for s, n in zip(mask.stride(), mask.shape, strict=True)]
    arguments = (
        query,
        key,
        value,
        query if mask is None else mask,
        out,
        scale,
        keys,
        *strides,
        *of_mask,
        heads,
        ceil_div(ceil_div(keys, tile), out.shape[1]),
    )
    constants = {
        **_sizes(query, key),
        "TILE": tile,
        "HAS_MASK": mask is not None,
        "PARTS": out.shape[1],
        **dependent_launch_options(query.device),
        "num_warps": _NUM_WARPS,
    }
    return TritonLaunch(attend, (batch * heads, out.shape[1], 1), arguments, constants)


def _sizes(query: torch.Tensor, key: torch.Tensor) -> dict[str, int]:
    return _sizes_of(query.shape[1] // key.shape[1], query.shape[2], query.shape[3])


def _sizes_of(group: int, queries: int, size: int) -> dict[str, int]:
    return {
        "GROUP": group,
        "NUM_ROWS": queries,
        "ROWS": MOST_QUERIES,
        "SIZE": size,
        "COLUMNS": size + _ADDED_COLUMNS,
    }


def join_parts(parts: torch.Tensor, heads: int, *, out: torch.Tensor) -> None:
    """Join what parts of the keys give.

    Args:
        parts: As ``attend_parts`` has written them.
        heads: Of keys.
        out: ``[batch, heads, queries, size]``, each head without gaps.
    """
    launch_join(parts, heads, out).run()


def launch_join(parts: torch.Tensor, heads: int, out: torch.Tensor) -> TritonLaunch:
    """Return how to join parts."""
    from millstream.kernels.rows.attention_kernel import join_attention  # Triton is there where there is a GPU

    group, queries = out.shape[1] // heads, out.shape[2]
    constants = {
        **_sizes_of(group, queries, out.shape[3]),
        "PARTS": 1 << (parts.shape[1] - 1).bit_length(),
        **dependent_launch_options(out.device),
        "num_warps": _NUM_WARPS,
    }
    arguments = (parts, out, parts.shape[1], heads, *out.stride()[:3])
    return TritonLaunch(join_attention, (parts.shape[0], group * queries, 1), arguments, constants)


_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("attend_parts(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")
_library.define("join_parts(Tensor parts, int heads, int[] size, int[] stride, ScalarType dtype) -> Tensor")
ATTEND = torch.ops.millstream.attend_parts.default
JOIN = torch.ops.millstream.join_parts.default


@torch.library.impl(_library, "attend_parts", "CompositeExplicitAutograd")
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return what the operator means; programs call ``attend_parts`` in its place."""
    batch, heads, keys, size = key.shape
    result = query.new_full(_shape_of_parts(key), -math.inf, dtype=torch.float32)
    tile = _tile(batch * heads, keys)
    length = ceil_div(ceil_div(keys, tile), result.shape[1]) * tile
    queries = query.float().reshape(batch, heads, -1, size)
    products = queries @ key.float().mT * scale
    if mask is not None:
        products += mask.expand(*query.shape[:3], keys).reshape(products.shape)
    found = result.view(batch, heads, *result.shape[1:])[..., : queries.shape[2], :]
    for number, part in enumerate((products * math.log2(math.e)).split(length, -1)):
        largest = part.amax(-1)
        weights = torch.exp2(part - torch.where(largest == -math.inf, 0, largest)[..., None])
        found[:, :, number, :, :size] = weights @ value[:, :, number * length :][:, :, :length].float()
        found[:, :, number, :, size] = largest
        found[:, :, number, :, size + 1] = weights.sum(-1)
    return result


def _shape_of_parts(key: torch.Tensor) -> tuple[int, ...]:
    batch, heads, keys, size = key.shape
    return batch * heads, num_parts(batch, heads, keys), MOST_QUERIES, size + _ADDED_COLUMNS


@torch.library.register_fake("millstream::attend_parts", lib=_library)
def _(query: torch.Tensor, key: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(_shape_of_parts(key), dtype=torch.float32)


@torch.library.impl(_library, "join_parts", "CompositeExplicitAutograd")
def _join(parts: torch.Tensor, heads: int, size: list[int], stride: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what the operator means; programs call ``join_parts`` in its place."""
    result = torch.empty_strided(size, stride, dtype=dtype, device=parts.device)
    values, largest, total = parts[..., : size[3]], parts[..., size[3]], parts[..., size[3] + 1]
    highest = largest.amax(1, keepdim=True)
    factor = torch.exp2(largest - torch.where(highest == -math.inf, 0, highest))
    total = (total * factor).sum(1)
    joined = (values * factor[..., None]).sum(1) / torch.where(total == 0, 1, total)[..., None]
    group = size[1] // heads * size[2]
    return result.copy_(joined[:, :group].reshape(size))


@torch.library.register_fake("millstream::join_parts", lib=_library)
def _(parts: torch.Tensor, _: int, size: list[int], stride: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=parts.device)


def bind_attention(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernels for attention that is split."""
    if node.target is ATTEND:
        return NodeWriter(
            attend_parts, tuple(arguments_of(node)), attend_parts.__name__, KernelKind.FUSED, ("attention",)
        )
    if node.target is JOIN:
        parts, heads, *_ = arguments_of(node)
        return NodeWriter(
            join_parts, (parts, heads), join_parts.__name__, KernelKind.FUSED, ("attention",), contiguous=(parts,)
        )
    return None
