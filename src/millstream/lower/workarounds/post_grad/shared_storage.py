"""Find whose memory the values of a graph come to lie in.

AOT autograd's graphs are functional, but for a ``copy_`` into each input that is written, whose result nobody uses.
Wherever a value is read, it is what it was made as; where an input is read, it is as it was before the graph ran.

Inductor keeps to that as long as each value has memory of its own. It has not where a value is a view, where a copy has
been left out, and where an operator works in place: those that can are made to, directly before the graph is lowered
(``reinplace_inplaceable_ops``). From then on the order of the nodes counts. What has to be read before that order lets
it is copied before: a clone is an expression, which Inductor computes in the kernel that reads it, or before the memory
is written where that comes first.

Private APIs of Inductor's passes; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import get_mutable_args
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor.fx_passes import post_grad, reinplace
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.passes.reinplace import _is_view_op

from millstream._torch.tensors import storage_id
from millstream._torch.workarounds import replaced

aten = torch.ops.aten
_COPY = aten.copy_.default
_higher = torch.ops.higher_order

#: Operators that may be made to work in place, on their first argument or on each tensor of that.
IN_PLACE = frozenset({*reinplace.inplaceable_ops, *reinplace._SCATTER_OP_TO_VIEW, *reinplace.inplaceable_foreach_ops})


@contextlib.contextmanager
def before_reinplacing(change: Callable[[fx.Graph], None]) -> Iterator[None]:
    """Have a graph changed inside the ``with`` block while it is functional, after all passes that take it to be."""
    reinplace_operators = post_grad.reinplace_inplaceable_ops

    def change_then_reinplace(updater: Any, graph: fx.Graph) -> None:
        change(graph)
        reinplace_operators(updater, graph)

    with replaced(post_grad, "reinplace_inplaceable_ops", change_then_reinplace):
        yield


class Copy(NamedTuple):
    """A node that writes an input of a graph, which input, and with what."""

    node: fx.Node
    written: fx.Node
    value: fx.Node


def find_copies(graph: fx.Graph) -> list[Copy]:
    """Return what writes the inputs of a functional graph."""
    copies = (Copy(node, *node.args[:2]) for node in graph.find_nodes(op="call_function", target=_COPY))
    return [copy for copy in copies if not copy.node.users and copy.written.op in ("placeholder", "get_attr")]


def find_homes(graph: fx.Graph, copies: Iterable[Copy]) -> dict[fx.Node, fx.Node]:
    """The written input whose memory a value may come to lie in, for each value that may, the inputs among them."""
    homes = {copy.written: copy.written for copy in copies}
    for node in graph.nodes:
        source = source_of(node)
        if source in homes:
            homes[node] = homes[source]
    return homes


def source_of(node: fx.Node) -> fx.Node | None:
    """The value whose memory another one may get: that it is a view of, or that its operator may work on in place."""
    if node.op != "call_function":
        return None
    source = _source_of_item(*node.args) if node.target is operator.getitem else node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    shares = node.target is operator.getitem or node.target in IN_PLACE or is_view_of(node, source)
    return source if shares else None


def is_view_of(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a value is ``source``, its operator's argument, seen in another way."""
    if node.target is operator.getitem:
        return source is node.args[0]
    return bool(_is_view_op(node.target)) or (_storage(node) is not None and _storage(node) == _storage(source))


def memory_of(node: Any) -> Any:
    """Return what a value is a view of; itself if it is none, or no node."""
    source = source_of(node) if isinstance(node, fx.Node) else None
    while source is not None and is_view_of(node, source):
        node, source = source, source_of(source)
    return node


def _source_of_item(parent: Any, key: Any) -> Any:
    """Return what one of several results may lie in; ``parent`` itself where that says so of all its results."""
    target = parent.target
    if target is _higher.auto_functionalized_v2:
        written = parent.kwargs["_all_bases"]
        return _nth(written, key - (len(parent.meta["val"]) - len(written)))
    if target is _higher.auto_functionalized:
        operation: Any = parent.args[0]
        written = [parent.kwargs[name] for name in get_mutable_args(operation)[0]]
        return _nth(written, key - max(len(operation._schema.returns), 1))
    if target is triton_kernel_wrapper_functional:
        return parent.kwargs["kwargs"][key]
    if target in IN_PLACE:
        return _nth(parent.args[0], key)
    return parent


def _nth(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, (list, tuple)) and 0 <= index < len(values) else None


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, Tensor) and torch._C._has_storage(value) else None


def stays(node: fx.Node, home: fx.Node) -> bool:
    """Return whether each element of a value, once it lies in its home, lies where the home has that element."""
    value, has_views, keeps_layout = node, False, True
    while value is not home:
        source: Any = source_of(value)
        if is_view_of(value, source):
            has_views = True
        else:
            keeps_layout = keeps_layout and _has_layout_of(value, source)
        value = source
    return not has_views or (keeps_layout and _has_layout_of(node, home))


def _has_layout_of(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta.get("val"), other.meta.get("val")
    if not (isinstance(one, Tensor) and isinstance(two, Tensor) and one.dtype == two.dtype):
        return False
    pairs = (one.size(), two.size()), (one.stride(), two.stride()), (one.storage_offset(), two.storage_offset())
    return len(one.size()) == len(two.size()) and all(statically_known_true(sym_eq(*pair)) for pair in pairs)


def clone(node: fx.Node) -> fx.Node:
    """A copy of a value, made as soon as it is there."""
    place = node
    if node.op == "placeholder":
        place = node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(place):
        copied = node.graph.call_function(aten.clone.default, (node,))
    copied.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    copied.meta["val"] = node.meta["val"].clone()
    return copied
