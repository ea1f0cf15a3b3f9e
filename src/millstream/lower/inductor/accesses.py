"""Reads and writes of a program's operations, and the values that their operators mean.

Inductor writes over memory in three ways: by operators in place, by the ``copy_`` of an input's new value, and by using
the memory of a value that dies for another one. What is told here is read off the loops that code was generated from
and the graph of operators, and not from the dependencies by which Inductor orders and fuses them: those are what
``millstream.check.values`` checks.

Private APIs of Inductor's graph, scheduler and passes; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cache, cached_property
from itertools import takewhile
from typing import Any, cast

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import ForeachKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V

from millstream._torch.dispatcher import is_users
from millstream._torch.workarounds import is_off, replaced
from millstream.check.values import OLD, MemoryRead, MemoryWrite, Misread, Nest, Operation, Version, find_misreads
from millstream.errors import MisreadError
from millstream.lower.inductor.indices import places_of, places_of_layout
from millstream.lower.origins import op_names, source_line

_LOADS = (MemoryUsageType.LOAD, MemoryUsageType.BUCKETIZE)
_SCATTERS = (reinplace._generalized_scatter, reinplace._inplace_generalized_scatter)
_STORES = (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)


class Notes:
    """Notes on a graph while Inductor compiles it.

    Attributes:
        old: Pairs of a node and one of those that it uses, where the latter is an input of the graph, or a view of one,
            in the functional graph, in which an input is written only at its end: its value before all writes.
        node_of: By the identity of an operation, the node that was lowered when it was registered.
        graph: What it was registered in.
    """

    def __init__(self) -> None:
        self.graph: GraphLowering | None = None
        self.old: set[tuple[fx.Node, fx.Node]] = set()
        self.node_of: dict[int, fx.Node] = {}

    def see_functional(self, graph: fx.Graph) -> None:
        """Note what uses inputs that the graph writes."""
        written = {
            source
            for node in graph.nodes
            for argument in _written_arguments(node)
            if (source := root(argument)) is not None and source.op == "placeholder"
        }
        for source in written:
            views = _views(source, follows_writes=False)
            self.old |= {(user, used) for used in views for user in used.users if _reads(user, used)}

    @contextlib.contextmanager
    def seeing_replaced(self, graph: fx.Graph, targets: Iterable[Any]) -> Iterator[None]:
        """Note for nodes that take the place of others what these have used."""
        before = {*graph.nodes}
        users = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
        old, others = set[fx.Node](), set[fx.Node]()
        for user in users:
            for used in user.all_input_nodes:
                (old if (user, used) in self.old else others).add(used)
        yield
        new = [node for node in graph.nodes if node not in before] if users else []
        self.old |= {
            (user, used) for user in new for used in old - others if used in user.all_input_nodes and _reads(user, used)
        }

    def find_misreads(self) -> list[Misread]:
        """Return what reads or leaves a wrong value, in the order of the program, told by operators and lines."""
        if self.graph is None:
            return []
        operations = self.graph.name_to_op
        with V.set_graph_handler(self.graph):
            found = find_misreads(_Describer(self.graph, self).nests())
        return [
            replace(each, reader=_told(each.reader, operations), writer=_told(each.writer, operations))
            for each in found
        ]


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """Take notes of what Inductor compiles inside the ``with`` block. Not for several threads at once.

    ``MILLSTREAM_WITHOUT=values`` leaves them out: then nothing is refused.
    """
    notes = Notes()
    if is_off("values"):
        yield notes
        return
    work_in_place, decompose = reinplace.reinplace_inplaceable_ops_core, reinplace.decompose_generalized_scatter
    register = GraphLowering.register_operation

    def note_and_work_in_place(graph: fx.Graph) -> None:
        notes.see_functional(graph)
        work_in_place(graph)

    def decompose_and_note(graph: fx.Graph) -> None:
        with notes.seeing_replaced(graph, _SCATTERS):
            decompose(graph)

    def register_and_note(self: Any, operation: ir.Operation) -> str:
        if type(self) is GraphLowering:  # and none for the choice of a template
            notes.graph = self
            notes.node_of[id(operation)] = self.current_node
        return register(self, operation)

    with (
        replaced(reinplace, "reinplace_inplaceable_ops_core", note_and_work_in_place),
        replaced(reinplace, "decompose_generalized_scatter", decompose_and_note),
        replaced(GraphLowering, "register_operation", register_and_note),
    ):
        yield notes


def check_values(notes: Notes) -> None:
    """Refuse a program that reads other values than those that are meant.

    Raises:
        MisreadError: It does, or leaves an input at another value.
    """
    misreads = notes.find_misreads()
    if misreads:
        raise MisreadError(f"{misreads[0]}.", construct=misreads[0].memory)


class _Describer:
    """Describes the accesses of one graph.

    Each write to some memory has a version, ``(owner, number)``: the number counts the operations that write a buffer
    in place, as they were registered; the owner, the buffers that have used the memory in turn.
    """

    def __init__(self, graph: GraphLowering, notes: Notes) -> None:
        self.graph, self.fx_graph, self.notes = graph, cast("fx.Graph", graph.graph), notes
        self.buffer, self.memory = cache(self._find_buffer), cache(self._find_memory)
        self.reuses: dict[str, str] = graph.wrapper_code.reuses
        self.order = {operation.operation_name: number for number, operation in enumerate(graph.operations)}
        self.writers: dict[str, list[str]] = {}  # by buffer, the operations that write it in place, as they were made
        for operation in graph.operations:
            for name in _mutated(operation):
                writers = self.writers.setdefault(self.buffer(name), [])
                if operation.get_operation_name() not in writers:
                    writers.append(operation.get_operation_name())
        self.rewritten = {self.memory(name) for name in (*self.writers, *self.reuses)}

    def nests(self) -> list[Nest]:
        """All of them, and as the last one what is read by the caller."""
        if not self.rewritten:
            return []
        found = [self._nest(node) for node in self.graph.scheduler.nodes]
        return [nest for nest in (*found, self._results()) if nest]

    # --- names ---

    def _find_buffer(self, name: str) -> str:
        """The buffer that a name stands for, which is another one for what is written in place."""
        while (target := _target(self.graph.try_get_buffer(name))) is not None:
            name = target
        return name

    def _find_memory(self, name: str) -> str:
        """The buffer that had the memory of a name first."""
        name = self.buffer(name)
        while name in self.reuses:
            name = self.buffer(self.reuses[name])
        return name

    def _owner(self, buffer: str) -> int:
        owner = 0
        while buffer in self.reuses:
            buffer, owner = self.buffer(self.reuses[buffer]), owner + 1
        return owner

    # --- versions ---

    def _number(self, operation: str, buffer: str) -> int:
        return self.writers.get(buffer, []).index(operation) + 1 if operation in self.writers.get(buffer, ()) else 0

    def _meant(self, name: str, operation: ir.Operation) -> frozenset[Version]:
        """Return what an operation means by a name: which write to the memory must have been the last."""
        buffer = self.buffer(name)
        owner, writers = self._owner(buffer), self.writers.get(buffer, ())
        if not writers:
            return frozenset({(owner, 0)})
        if buffer != name:  # what one of them wrote
            made_by: Any = self.graph.get_buffer(name).get_defining_op()
            return frozenset({(owner, self._number(made_by.operation_name, buffer))})
        place = self.order[operation.operation_name]
        before = len([*takewhile(lambda writer: self.order[writer] < place, writers)])
        uses = self._uses.get(buffer, {})
        origins = operation.get_origins()
        meant = {number for user, numbers in uses.items() if user in origins for number in numbers}
        node = self.notes.node_of.get(id(operation))
        if not meant or (node in origins and any(self._node(writer) is node for writer in writers[:before])):
            meant.add(before)
        return frozenset((owner, number) for number in meant)

    def _node(self, operation: str) -> fx.Node | None:
        return self.notes.node_of.get(id(self.graph.operations[self.order[operation]]))

    @cached_property
    def _uses(self) -> dict[str, dict[fx.Node, set[int]]]:
        """By input, and by the operators that use it: after how many of the writes to it."""
        place = {node: number for number, node in enumerate(self.fx_graph.nodes)}
        inputs = {str(node.target): node for node in self.fx_graph.find_nodes(op="placeholder")}
        found: dict[str, dict[fx.Node, set[int]]] = {}
        for name, writers in self.writers.items():
            if name not in inputs:
                continue
            written = [place.get(self._node(writer), -1) for writer in writers]  # type: ignore[arg-type]
            uses = found[name] = {}
            for used in _views(inputs[name], follows_writes=True):
                for user in (each for each in used.users if _reads(each, used)):
                    is_old = (user, used) in self.notes.old
                    number = 0 if is_old else sum(each < place[user] for each in written)
                    uses.setdefault(user, set()).add(number)
        return found

    # --- accesses ---

    def _nest(self, node: Any) -> Nest:
        if not isinstance(node, ForeachKernelSchedulerNode):
            found = [self._operation(each) for each in node.get_nodes()]
        else:
            parts = [part.get_nodes() for part in node.get_subkernel_nodes()]
            made = {self.memory(name) for nodes in parts for each in nodes for name in each.get_buffer_names()}
            found = [self._operation(each, number, made) for number, nodes in enumerate(parts) for each in nodes]
        return tuple(each for each in found if each.reads or each.writes)

    def _operation(self, node: Any, part: int = 0, made: Set[str] = frozenset()) -> Operation:
        """Describe a node, in a part of a kernel whose parts make some memory."""
        operation, body = node.node, getattr(node, "_body", None)
        if operation is None or isinstance(node, NopKernelSchedulerNode):
            return Operation(node.get_name())
        name = operation.operation_name
        if body is None:
            reads, writes = self._of_library(operation)
        else:
            reads = [
                MemoryRead(self.memory(each), places_of(body, body.indexing_exprs[index]), self._meant(each, operation))
                for each, index in _entries(body, _LOADS)
                if self._is_rewritten(each) or self.memory(each) in made
            ]
            writes = [
                MemoryWrite(self.memory(each), places_of(body, body.indexing_exprs[index]), self._written(each, name))
                for each, index in _entries(body, _STORES)
                if self.memory(each) in made or (self._is_rewritten(each) and self._written(each, name) != OLD)
            ]
        return Operation(name, tuple(reads), tuple(writes), part, _is_users(operation))

    def _of_library(self, operation: ir.Operation) -> tuple[list[MemoryRead], list[MemoryWrite]]:
        """The accesses of what is no loop: a library's kernel, or a template."""
        reads, writes = [], []
        mutated = _mutated(operation)
        for used in _inputs(operation):
            name = used.get_name()
            if self._is_rewritten(name):
                places = places_of_layout(used.get_layout())
                reads.append(MemoryRead(self.memory(name), places, self._meant(name, operation)))
                if name in mutated:
                    number = self._number(operation.get_operation_name(), self.buffer(name))
                    writes.append(MemoryWrite(self.memory(name), places, (self._owner(self.buffer(name)), number)))
        return reads, writes

    def _is_rewritten(self, name: str) -> bool:
        return self.memory(name) in self.rewritten and name not in self.graph.removed_buffers

    def _written(self, name: str, operation: str) -> Version:
        """The version that a store makes: ``OLD`` for the first value of a buffer in memory of its own."""
        buffer = self.buffer(name)
        return self._owner(buffer), self._number(operation, buffer) if buffer != name else 0

    def _results(self) -> Nest:
        """Return what the caller reads at the end."""
        node = next(iter(reversed(self.fx_graph.nodes)))
        reads = []
        for given, value in zip(node.args[0], self.graph.graph_outputs, strict=True):  # type: ignore[arg-type]
            if not isinstance(value, (ir.TensorBox, ir.StorageBox, ir.BaseView, ir.Buffer)):
                continue
            name = value.get_name()
            if self._is_rewritten(name):
                buffer = self.buffer(name)
                last = (self._owner(buffer), len(self.writers.get(buffer, ())))
                meant = OLD if (node, given) in self.notes.old else last
                reads.append(MemoryRead(self.memory(name), places_of_layout(value.get_layout()), frozenset({meant})))
        return (Operation("the caller", tuple(reads)),) if reads else ()


def root(node: Any) -> fx.Node | None:
    """The node whose memory another one's result lies in, as far as operators say: itself, if it is no view."""
    while isinstance(node, fx.Node) and (source := _aliased(node)) is not None:
        node = source
    return node if isinstance(node, fx.Node) else None


def _views(source: fx.Node, *, follows_writes: bool) -> list[fx.Node]:
    """A node and all views of it, with results of operators that write it in place if those are to be followed."""
    found = [source]
    for node in found:
        found += [
            user
            for user in node.users
            if _aliased(user) is node and (follows_writes or not _written_arguments(user)) and user not in found
        ]
    return found


def _reads(user: fx.Node, used: fx.Node) -> bool:
    """Return whether an operator reads an argument: views do not, nor does what overwrites it."""
    if user.target is torch.ops.aten.copy_.default:
        return used in user.args[1:]
    return _aliased(user) is not used or bool(_written_arguments(user)) or _storage(user) != _storage(used)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _aliased(node: fx.Node) -> Any:
    """The argument whose memory a node's result lies in, by its schema; ``None`` where it has its own."""
    if node.op != "call_function" or not node.args:
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # an item of several results
        source = node.args[0]
        is_item = getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node)
        return source if is_item and _returns_views(source) else None  # type: ignore[arg-type]
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    shared = schema.returns[0].alias_info.before_set
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.before_set & shared:
            return value
    return None


def _returns_views(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


def _written_arguments(node: fx.Node) -> list[Any]:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return [part for value in written for part in (value if isinstance(value, (list, tuple)) else [value])]


def _is_users(operation: ir.Operation) -> bool:
    """Return whether a kernel is called for an operator or a Triton kernel of the user's."""
    return isinstance(operation, ir.UserDefinedTritonKernel) or is_users(getattr(operation, "op_overload", None))


def _target(buffer: Any) -> str | None:
    """The name of the buffer that another one is written into, in place."""
    layout = getattr(buffer, "layout", None)
    return layout.get_buffer().get_name() if isinstance(layout, ir.MutationLayoutSHOULDREMOVE) else None


def _mutated(operation: ir.Operation) -> set[str]:
    return {name for buffer in operation.get_outputs() for name in buffer.get_mutation_names()}


def _inputs(operation: Any) -> Iterator[Any]:
    """The tensors that a library's kernel, or a template, is given."""
    waiting = [*getattr(operation, "inputs", ()), *getattr(operation, "kwargs", {}).values()]
    for value in waiting:
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, ir.IRNode) and value.has_tensor_output():
            yield value


def _entries(body: Any, kinds: Iterable[MemoryUsageType]) -> Iterator[tuple[str, str]]:
    """Return what a loop loads, or stores: names of buffers, and of indices into them."""
    return ((entry.buffer_name, entry.index_name) for kind in kinds for entry in body.memory_usage[kind])


def _told(name: str, operations: Mapping[str, ir.Operation]) -> str:
    """An operation by its operators, and the user's line that they come from."""
    if name not in operations:
        return name
    origins = [*operations[name].get_origins()]
    line = next((line for origin in origins if (line := source_line(origin))), "")
    return f"{' + '.join(op_names(origins)) or name}{f' ({line})' if line else ''}"
