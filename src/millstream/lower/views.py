"""Views among a graph's nodes: what memory they are of, and whether they stay within it."""

from __future__ import annotations

from typing import Any

import torch

from millstream.errors import LoweringError
from millstream.lower.origins import source_line

AS_STRIDED = torch.ops.aten.as_strided.default


def check_views(graph: torch.fx.GraphModule) -> None:
    """Refuse views that reach beyond the input that they are of: a CUDA graph may read it where it has been copied to.

    Raises:
        LoweringError: There is one, as ``as_strided`` of a part of a tensor can be.
    """
    for node in graph.graph.find_nodes(op="call_function", target=AS_STRIDED):
        source = input_of(node)
        if source is None:
            continue
        first, last = _extent(node.meta["val"])
        start, end = _extent(source.meta["val"])
        if first < start or last > end:
            raise reaches_beyond(node, source)


def reaches_beyond(node: torch.fx.Node, source: torch.fx.Node) -> LoweringError:
    """Return what is wrong with a view that begins before the input that it is of, or ends after it."""
    (first, last), (start, end) = _extent(node.meta["val"]), _extent(source.meta["val"])
    return LoweringError(
        f"A view reaches from element {first - start} to {last - start} of an input that has "
        f"{end - start + 1} ({source_line(node)}).",
        construct=str(node.target),
    )


def input_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input of the graph that a view is of; ``None`` where it is of something else."""
    source = base_of(node)
    return source if source is not None and source.op == "placeholder" else None


def base_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The value whose memory a view lies in, itself where it is none; ``None`` where that is not known."""
    source: Any = node
    while source.op == "call_function" and source.args and _storage(source.args[0]) == _storage(node):
        source = source.args[0]
    return source if _storage(node) is not None else None


def _storage(node: Any) -> int | None:
    value: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _extent(value: torch.Tensor) -> tuple[Any, Any]:
    """The first and the last element of a tensor, counted from the start of its memory; nothing of an empty one.

    Of symbolic sizes: what is decided about them becomes a guard.
    """
    start = value.storage_offset()
    steps = zip(value.shape, value.stride(), strict=True)
    return start, start + sum((size - 1) * stride for size, stride in steps) if value.numel() else start - 1
