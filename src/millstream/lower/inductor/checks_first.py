"""Let C++ kernels on a CPU check indices before others write to inputs, so that an error leaves these as they were.

**Contract**
- No kernel both checks indices and writes to an input of the graph, but for single operations that do, as
``index_copy_`` on a buffer does.
- What writes to inputs comes after what may raise, unless that needs what was written.

Private APIs of Inductor's scheduler; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch._inductor.virtualized import V

from millstream._torch.workarounds import replaced
from millstream.lower.operators import may_raise


class _Operations:
    """Names of a graph's operations that come before those that write to its inputs, and of the latter.

    Args:
        scheduler: Before it has fused any.
    """

    def __init__(self, scheduler: Any) -> None:
        nodes = [part for node in scheduler.nodes for part in node.get_nodes()]
        self._known: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()
        self.raising: set[str] = set()
        self.first: set[str] = set()
        self.last: set[str] = set()
        if all(node.get_device() is None or node.get_device().type == "cpu" for node in nodes):
            self.raising = _find_raising(nodes, {*scheduler.mutation_real_name.values()})
        if self.raising:
            self.first = set(self.raising)
            for node in nodes:
                if node.get_name() in self.raising:
                    self.first |= node.ancestors
            self.last = {node.get_name() for node in nodes if _writes_input(scheduler, node)} - self.first

    def may_be_one(self, node: Any, other: Any) -> bool:
        """Return whether two nodes may become one: else what writes would come with what must be there for a check."""
        if not self.last:
            return True
        (is_first, is_last), (other_first, other_last) = self._ends(node), self._ends(other)
        return not (is_first and other_last) and not (other_first and is_last)

    def _ends(self, node: Any) -> tuple[bool, bool]:
        """Return whether a node has operations that come first, and such that come last.

        It is asked for each other node.
        """
        if node not in self._known:
            names = node.get_operation_names()
            self._known[node] = not names.isdisjoint(self.first), not names.isdisjoint(self.last)
        return self._known[node]

    def order(self, nodes: list[Any]) -> list[Any]:
        """The nodes, those last that write to inputs, and what comes after these."""
        if not self.last:
            return nodes
        late: set[str] = set()
        first, last = [], []
        for node in nodes:
            names = node.get_operation_names()
            is_late = not names.isdisjoint(self.last) or not late.isdisjoint(node.ancestors)
            if is_late:
                late |= names
            (last if is_late else first).append(node)
        end = max((place for place, node in enumerate(first) if self.raises(node)), default=-1) + 1
        early = {id(node) for node in first[:end]}
        return first[:end] + [node for node in nodes if id(node) not in early]

    def raises(self, node: Any) -> bool:
        """Return whether a node may raise."""
        return not node.get_operation_names().isdisjoint(self.raising)

    def writes(self, node: Any) -> bool:
        """Return whether a node writes to an input after all checks."""
        return not node.get_operation_names().isdisjoint(self.last)


@contextlib.contextmanager
def checks_first() -> Iterator[None]:
    """Order C++ kernels so inside the ``with`` block. Not for several threads at once."""
    known: WeakKeyDictionary[Any, _Operations] = WeakKeyDictionary()
    can_fuse, find_last_uses, write = Scheduler.can_fuse, Scheduler.compute_last_usage, CppScheduling.codegen_node

    def operations(scheduler: Any) -> _Operations:
        if scheduler not in known:
            known[scheduler] = _Operations(scheduler)
        return known[scheduler]

    def can_fuse_alike(self: Any, node: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
        return operations(self).may_be_one(node, other) and can_fuse(self, node, other, *args, **kwargs)

    def order_then_find_last_uses(self: Any) -> None:
        self.nodes = operations(self).order(self.nodes)
        find_last_uses(self)

    def write_apart(self: Any, node: Any) -> None:
        known = operations(self.scheduler)
        if known.writes(node) and any(map(known.raises, self.kernel_group.scheduled_nodes)):
            self.flush()  # a kernel of its own, which waits for checks on other streams
        write(self, node)

    with (
        replaced(Scheduler, "can_fuse", can_fuse_alike),
        replaced(Scheduler, "compute_last_usage", order_then_find_last_uses),
        replaced(CppScheduling, "codegen_node", write_apart),
    ):
        yield


def check_classes(graph: fx.Graph, inputs: Sequence[Any]) -> dict[str, bool]:
    """Inductor's options for a graph, so that it refuses classes that there are not.

    The kernel of a loss checks them, and is left out where only gradients are asked for. Those are computed by
    comparing with each class, unless Inductor is told to scatter, which checks as well.
    """
    aten = torch.ops.aten
    if not all(each.is_cpu for each in inputs if isinstance(each, torch.Tensor)):  # others are sizes
        return {}
    losses = (
        node
        for target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
        for node in graph.find_nodes(op="call_function", target=target)
    )
    are_needed = (any(part.args[1] == 0 and _is_needed(part) for part in loss.users) for loss in losses)
    return {} if all(are_needed) else {"optimize_scatter_upon_const_tensor": False}


def _is_needed(value: fx.Node) -> bool:
    """Return whether a result, or something that is written, depends on more of a value than its shape."""
    known, todo = {value}, [value]
    while todo:
        for user in todo.pop().users:
            schema = getattr(user.target, "_schema", None)
            if user.op == "output" or (schema is not None and schema.is_mutable):
                return True
            if user not in known and user.target is not torch.ops.aten.ones_like.default:  # a backward pass begins
                known.add(user)
                todo.append(user)
    return False


class _Check(NamedTuple):
    """That the values in a buffer, or in a part of it, are indices into a dimension of some size."""

    buffer: str
    size: Any
    wraps: bool
    is_whole: bool

    @property
    def of_all(self) -> _Check:
        """The same of all values in the buffer."""
        return self._replace(is_whole=True)


def _find_raising(nodes: Sequence[Any], changed: set[str]) -> set[str]:
    """Names of the operations that may raise, but for those that check again what others have checked before."""
    raising = {node.get_name(): _checks(node) for node in nodes if _may_raise(node)}
    known: set[_Check] = set()
    for name, found in [*raising.items()]:
        if found is not None and all(check.of_all in known for check in found):
            del raising[name]
        known |= {check for check in found or () if check.is_whole and check.buffer not in changed}
    return {*raising}


def _may_raise(node: Any) -> bool:
    if isinstance(node, SchedulerNode):
        found = _checks(node)
        return found is None or bool(found)
    if isinstance(node.node, (ir.IndexPutFallback, ir.ScatterFallback)):
        return True
    return isinstance(node.node, ir.FallbackKernel) and may_raise(node.node.op_overload)


def _checks(node: Any) -> list[_Check] | None:
    """The checks of a loop; ``None`` if there are others than of a buffer's values as they are."""
    body = getattr(node, "_body", None)
    if not isinstance(node, SchedulerNode):
        return None
    if body is None:  # a template, of products of matrices
        return []
    graph = body.root_block.graph
    if body.memory_usage[MemoryUsageType.CHECK_BOUNDS] or any(
        graph.find_nodes(op="call_method", target="device_assert_async")
    ):
        return None
    found = []
    for name, part in body.submodules.items():
        if not name.startswith("set_indirect"):
            continue
        settings = getattr(getattr(part, "clone", None), "keywords", None)
        if settings is None:
            return None
        if settings["check"]:
            uses = [*graph.find_nodes(op="call_module", target=name)]
            load = uses[0].args[0] if len(uses) == 1 else None  # none in a part that is masked
            while load is not None and load.target == "to_dtype":
                load = load.args[1]
            if load is None or load.target != "load":
                return None
            buffer, index = load.args[1], body.indexing_exprs[load.args[2].args[0]]
            reached = sympy.prod([body.var_ranges.get(symbol, 0) for symbol in index.free_symbols])
            is_whole = index.subs(dict.fromkeys(index.free_symbols, 0)) == 0 and reached == V.graph.get_numel(buffer)
            found.append(_Check(buffer, settings["size"], settings["wrap_neg"], is_whole))
    return found


def _writes_input(scheduler: Any, node: Any) -> bool:
    inputs = V.graph.graph_inputs
    mutated = (name for buffer in node.get_outputs() for name in buffer.get_mutations())
    return any(name in inputs or scheduler.mutation_real_name.get(name) in inputs for name in mutated)
