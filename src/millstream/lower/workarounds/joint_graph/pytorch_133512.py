"""``as_strided`` and ``as_strided_copy`` find elements by where they lie in the memory of what they are given.

Sizes, strides and offset are of that memory, and not of a view of it. Inductor counted from where a computed tensor's
slice begins, and let such a tensor lie as it likes where ``as_strided_copy`` reads it. So both read the tensor that the
views are of, which Inductor then lays out as eager does.

An input that does not lie densely is dense once the functional graph has updated it: of such a one eager's elements are
not to be had, and the program is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from millstream._torch.workarounds import Workaround
from millstream.errors import LoweringError
from millstream.lower.origins import source_line
from millstream.lower.views import AS_STRIDED, base_of

aten = torch.ops.aten
_COPY = aten.as_strided_copy.default


def _read_bases(graph: torch.fx.Graph) -> None:
    for node in [
        each for target in (AS_STRIDED, _COPY) for each in graph.find_nodes(op="call_function", target=target)
    ]:
        source: Any = node.args[0]
        base = base_of(source)
        if base is None or base.op != "call_function" or not _is_of_one_kind(source, base):
            continue
        offset = _offset(node, base)
        for written in (each.args[0] for each in graph.find_nodes(op="call_function", target=aten.copy_.default)):
            if _is_update_of(written, base, has_offset=bool(offset)):
                raise LoweringError(
                    f"{node.target} reads an input that does not lie densely, and was updated ({source_line(node)}).",
                    construct=str(node.target),
                )
        if node.target is _COPY or source is not base:
            _read_base(graph, node, base, offset)


def _is_of_one_kind(view: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Return whether elements of a view are those of its base, and no other numbers of the same bits."""
    one, other = view.meta["val"], base.meta["val"]
    return view is base or (one.dtype == other.dtype and not one.is_complex() and one.is_neg() == other.is_neg())


def _is_update_of(written: Any, base: torch.fx.Node, *, has_offset: bool) -> bool:
    """Return whether a computed tensor may be the new value of an input that lies in another way."""
    old, new = written.meta["val"], base.meta["val"]
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    lies_alike = old.stride() == new.stride() and (not has_offset or old.storage_offset() == new.storage_offset())
    return not lies_alike and _depends_on(base, written)


def _depends_on(node: torch.fx.Node, other: Any) -> bool:
    met, waiting = {node}, [node]
    while waiting:
        new = [each for each in waiting.pop().all_input_nodes if each not in met]
        met.update(new)
        waiting += new
    return other in met


def _offset(node: torch.fx.Node, base: torch.fx.Node) -> tuple[Any, ...]:
    """Return where in the memory of its base a view begins, as an argument; nothing where that is at the start.

    Whatever offset a computed value is said to have, Inductor's begins where its memory does.
    """
    source, _, _, *given = node.args
    start = given[0] if given and given[0] is not None else source.meta["val"].storage_offset()  # type: ignore[union-attr]
    start = _values(start) - base.meta["val"].storage_offset()
    return () if isinstance(start, int) and start == 0 else (start,)


def _read_base(graph: torch.fx.Graph, node: torch.fx.Node, base: torch.fx.Node, offset: tuple[Any, ...]) -> None:
    _, size, stride, *_ = node.args
    value = base.meta["val"]
    with graph.inserting_before(node):
        view = result = graph.call_function(AS_STRIDED, (base, size, stride, *offset))
        with value.fake_mode:
            start = value.storage_offset() + sum(offset)
            view.meta = {**node.meta, "val": value.as_strided(*map(_values, (size, stride)), start)}
        if node.target is _COPY:
            result = graph.call_function(aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
            result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _values(tree: Any) -> Any:
    """Sizes, with numbers for nodes."""
    return tree_map_only(torch.fx.Node, lambda node: node.meta["val"], tree)


WORKAROUND = Workaround(
    "pytorch#133512",
    "wrong numbers of as_strided_copy, and of as_strided of a part of what was computed",
    joint_pass=_read_bases,
)
