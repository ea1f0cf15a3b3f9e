"""A custom operator that is given a copy of what it writes reads that copy.

Of ``y = x.clone(); operator(y, x)`` Inductor leaves out the copy, as nothing writes ``y``, and then lets the operator
write into ``x`` itself, as nothing reads ``x`` afterwards. So the operator reads what it has just written. Where it is
given one tensor twice by the user, it is to see that: what shares memory before Inductor's passes is noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.fx_passes import post_grad, reinplace
from torch._inductor.fx_utils import get_node_storage
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from millstream._torch.workarounds import Workaround, replaced

_SHARED = "shared_by_user"
"""Where the ``meta`` of a node has which of the values that it reads lie in memory that it writes."""


@contextlib.contextmanager
def _note_shared() -> Iterator[None]:
    upstream = post_grad.remove_noop_ops

    def after_notes(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            reads, written = _arguments(node)
            if written:  # the first note counts: this pass runs twice
                node.meta.setdefault(_SHARED, [_lies_in(written, leaf) for leaf in tree_leaves(reads)])
        upstream(graph)

    with replaced(post_grad, "remove_noop_ops", after_notes):
        yield


@contextlib.contextmanager
def _copy_what_is_written() -> Iterator[None]:
    upstream = reinplace.reinplace_inplaceable_ops_core

    def with_copies(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            _copy_reads(graph, node)
        upstream(graph)

    with replaced(reinplace, "reinplace_inplaceable_ops_core", with_copies):
        yield


def _copy_reads(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Make copies of what an operator reads in memory that it writes, where that was not so for the user."""
    reads, written = _arguments(node)
    leaves, tree = tree_flatten(reads)
    shared = node.meta.get(_SHARED, [False] * len(leaves))
    for place, leaf in enumerate(leaves):
        if _lies_in(written, leaf) and not shared[place]:
            with graph.inserting_before(node):
                leaves[place] = reinplace.graph_call_function(graph, torch.ops.aten.clone.default, leaf)
            changed = tree_unflatten(leaves, tree)
            if node.target is _TRITON:
                changed = {"kwargs": {**node.kwargs["kwargs"], **changed}}  # type: ignore[dict-item]
            node.kwargs = {**node.kwargs, **changed}


_TRITON = torch.ops.higher_order.triton_kernel_wrapper_functional
_CUSTOM = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)


def _arguments(node: torch.fx.Node) -> tuple[dict[str, Any], set[Any]]:
    """Return what an operator reads, by name, and the memory that it writes; nothing of one that does not write."""
    kwargs: dict[str, Any] = dict(node.kwargs)
    if node.target is _TRITON:
        values, names = kwargs["kwargs"], set(kwargs["tensors_to_clone"])
    elif node.target in _CUSTOM and isinstance(operator := node.args[0], torch._ops.OpOverload):
        values = kwargs
        names = {each.name for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write}
        names.add("_all_bases")
    else:
        return {}, set()
    written = tree_leaves([value for name, value in values.items() if name in names])
    reads = {name: value for name, value in values.items() if name not in names}
    return reads, {get_node_storage(leaf) for leaf in written if isinstance(leaf, torch.fx.Node)} - {None}


def _lies_in(written: set[Any], value: Any) -> bool:
    """Return whether a value is a tensor in one of these storages."""
    return isinstance(value, torch.fx.Node) and get_node_storage(value) in written


WORKAROUND = Workaround(
    "pytorch#198031",
    "wrong numbers of custom operators that are given a copy of what they write",
    tracing=_note_shared,
    lowering=_copy_what_is_written,
)
