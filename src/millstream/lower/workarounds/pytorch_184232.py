"""``as_strided`` of an input that does not begin at the start of its memory finds the right elements.

Its offset counts from the start of that memory. Kernels are given where the input begins, and Inductor counted from
there: wrong numbers without a word, where they lie within what is allocated.
"""

from __future__ import annotations

from typing import Any

import torch

from millstream.errors import LoweringError
from millstream.lower.translate import source_line
from millstream.lower.workarounds.registry import Workaround

_AS_STRIDED = torch.ops.aten.as_strided.default


def _count_from_inputs(graph: torch.fx.Graph) -> None:
    """Write offsets as Inductor takes them."""
    for node in graph.find_nodes(op="call_function", target=_AS_STRIDED):
        source = _input_of(node)
        if source is None:
            continue
        start, first = source.meta["val"].storage_offset(), node.meta["val"].storage_offset()
        if first < start:
            raise LoweringError(
                f"A view reaches from element {first - start} of an input that has {source.meta['val'].numel()} "
                f"({source_line(node)}).",
                construct=str(node.target),
            )
        node.args, node.kwargs = (*node.args[:3], first - start), {}


def _input_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input whose memory a view is of, if it is one's."""
    source: Any = node
    while source.op == "call_function" and source.args and _storage(source.args[0]) == _storage(node):
        source = source.args[0]
    return source if source.op == "placeholder" and _storage(node) is not None else None


def _storage(node: Any) -> int | None:
    value: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_plain else None


WORKAROUND = Workaround(
    "pytorch#184232",
    "wrong numbers of `as_strided` of a part of a tensor",
    until=(2, 13),
    joint_pass=_count_from_inputs,
)
