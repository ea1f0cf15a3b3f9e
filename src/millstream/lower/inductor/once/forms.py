"""The input from which a kernel is generated, with numbers in place of the names of buffers.

Kernels that are equal but for names have the same form.

Private APIs of Inductor's scheduler and loops; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.loop_body import LoopBody, MemoryUsageType
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

_BUFFER_FIRST = frozenset({"load", "store", "store_reduction", "load_seed"})
"""Operations of a loop whose first argument, after the handler, is a buffer's name."""

_READS = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED)
_LOOPS = (ir.Pointwise, ir.Reduction, ir.Scatter)


class UnknownFormError(Exception):
    """A kernel has something in it that is not described here."""


class BufferNumbers:
    """Numbers for the names of buffers, in the order in which they are met.

    Attributes:
        number: By name.
        offset: By the place of an element that is read alone.
        picked: Names of the buffers of which only such elements are read, as of a stack of numbers or of seeds.
    """

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.offset: dict[int, int] = {}
        self.picked: set[str] = set()

    def __call__(self, name: str) -> int:
        return self.number.setdefault(name, len(self.number))

    def of_seed(self, offset: Any) -> Hashable:
        """Likewise for one that is given to a Triton kernel, which is told whether it is 1 or a multiple of 16."""
        return self.of_offset(offset), int(offset) == 1, int(offset) % 16 == 0

    def of_offset(self, offset: Any) -> Hashable:
        """A number for the place of an element."""
        return "element", self.offset.setdefault(int(offset), len(self.offset))


def form_of(nodes: Sequence[SchedulerNode], names: BufferNumbers) -> Hashable:
    """Return what the code of some loops in one kernel depends on.

    That is the loops as they are, and of each buffer how it lies in memory, whether the kernel may write over it, and
    whether anything else needs it.

    Args:
        nodes: The loops.
        names: Given the numbers of all buffers that they use, and of those that have to do with these.

    Raises:
        UnknownFormError: There is something in them that is not known here.
    """
    names.picked |= _find_picked(nodes)
    place = {id(node): number for number, node in enumerate(nodes)}
    loops = tuple(_node(node, names) for node in nodes)
    outputs = {buffer.get_name(): _uses(buffer, place) for node in nodes for buffer in node.get_outputs()}
    for name in outputs:
        names(name)
    facts: list[Hashable] = []
    while len(facts) < len(names.number):  # a buffer may name others
        facts += [
            (name in names.picked, _buffer(name, names), outputs.get(name)) for name in [*names.number][len(facts) :]
        ]
    return loops, tuple(facts)


def _node(node: SchedulerNode, names: BufferNumbers) -> Hashable:
    operation = node.node
    if type(node) is not SchedulerNode or not isinstance(operation, ir.ComputedBuffer):
        raise UnknownFormError(type(operation).__name__)
    loop = operation.data
    if not isinstance(loop, _LOOPS) or type(loop).__module__ != ir.__name__:
        raise UnknownFormError(type(loop).__name__)
    device, group = node.group
    patches = getattr(operation, "get_config_patches", dict)()
    return (
        (type(loop).__name__, str(device), _literal(group), _literal(node._sizes), node.is_reduction()),
        (str(operation.get_reduction_type()), str(getattr(loop, "reduction_hint", None)), _literal(patches or {})),
        tuple((names(each.get_name()), _all(each.get_mutations(), names)) for each in node.get_outputs()),
        body_form(node._body, names),
        tuple(_dependency(each, names) for each in node.read_writes.reads),
        tuple(_dependency(each, names) for each in node.read_writes.writes),
        tuple(each.name in node.last_usage for each in node.read_writes.reads_and_writes()),
        tuple((names(old), names(new)) for old, new in find_in_place(node)),
    )


def find_in_place(node: SchedulerNode) -> list[tuple[str, str]]:
    """The buffers that a loop writes over, and what it writes there, as far as that depends on who else uses them."""
    found: list[tuple[str, str]] = []
    kernel = SimpleNamespace(
        args=SimpleNamespace(make_inplace=lambda old, new: found.append((old, new))), inplace_update_buffers={}
    )
    with V.set_kernel_handler(kernel):  # type: ignore[arg-type]
        node.decide_inplace_update()
    return found


def body_form(body: Any, names: BufferNumbers) -> Hashable:
    """Return what a loop does, and where.

    Raises:
        UnknownFormError: There is something in it that is not known here.
    """
    submodules = tuple((name, _submodule(name, each)) for name, each in body.submodules.items())
    return (
        (_literal(body.sizes), tuple(body.iter_vars), tuple(body.reduce_vars), tuple(body.var_ranges.items())),
        indices_form(body, names),
        (tuple(body.indirect_vars), tuple(body.indirect_var_ranges.items())),
        submodules,
        _graph(body.root_block.graph, names),
        tuple((name, _graph(block.graph, names)) for name, block in body.subblocks.items()),
    )


def indices_form(body: Any, names: BufferNumbers) -> Hashable:
    """Return where a loop reads and writes; of an element that is read alone, only whether others read the same one."""
    users = {}
    for _, entry in _accesses(body):
        users.setdefault(entry.index_name, set()).add(entry.buffer_name)
    found = []
    for name, index in body.indexing_exprs.items():
        is_picked = users.get(name, set()) & names.picked
        element = names.of_offset(index) if is_picked else None
        found.append((name, element if is_picked and users[name] <= names.picked else _literal(index)))
    return tuple(found)


def _find_picked(nodes: Sequence[SchedulerNode]) -> set[str]:
    """The buffers of which single elements are read, and nothing else."""
    picked, others = set(), set()
    for node in nodes:
        if isinstance(body := node._body, LoopBody):
            for kind, entry in _accesses(body):
                index = body.indexing_exprs[entry.index_name]
                is_element = kind in _READS and index.is_Integer and int(index) >= 0
                (picked if is_element else others).add(entry.buffer_name)
    return picked - others


def _accesses(body: Any) -> Iterator[tuple[Any, Any]]:
    return ((kind, entry) for kind, entries in body.memory_usage.items() for entry in entries)


def _submodule(name: str, function: Any) -> Hashable:
    """Return what a part of a loop's body does that is no operation."""
    if name == "get_index" or name.startswith("masked_subblock"):
        return None
    settings = getattr(getattr(function, "clone", None), "keywords", None)
    if not name.startswith("set_indirect") or settings is None:
        raise UnknownFormError(name)
    return _literal(settings)


def _graph(graph: torch.fx.Graph, names: BufferNumbers) -> Hashable:
    number = {node: place for place, node in enumerate(graph.nodes)}

    def argument(value: Any) -> Hashable:
        if isinstance(value, torch.fx.Node):
            return ("node", number[value])
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(argument, value))
        if isinstance(value, Mapping):
            return tuple((key, argument(each)) for key, each in value.items())
        return _literal(value)

    found: list[Hashable] = []
    for node in graph.nodes:
        args = node.args
        if node.op == "call_method" and node.target in _BUFFER_FIRST and len(args) > 1:
            is_seed = node.target == "load_seed" and not node.kwargs
            rest = names.of_seed(args[2]) if is_seed else argument(args[2:])
            found.append((node.op, node.target, names(args[1]), rest, argument(node.kwargs)))
        elif node.op == "call_method" and node.target in ("bucketize", "partial_accumulate"):
            raise UnknownFormError(node.target)
        else:
            found.append((node.op, str(node.target), argument(args), argument(node.kwargs)))
    return tuple(found)


def _literal(value: Any) -> Hashable:
    """A value such that others are equal only if they are written alike: 1, 1.0 and True are not."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_literal, value))
    if isinstance(value, Mapping):
        return tuple((key, _literal(each)) for key, each in value.items())
    if isinstance(value, sympy.Basic):
        return type(value).__name__, value
    return type(value).__name__, repr(value)


def _dependency(dependency: Any, names: BufferNumbers) -> Hashable:
    if isinstance(dependency, MemoryDep) and dependency.name in names.picked:
        return "element", names(dependency.name), names.of_offset(dependency.index)
    if isinstance(dependency, MemoryDep):
        where = dependency.index, dependency.var_names, dependency.size, dependency.mode
        return "memory", names(dependency.name), _literal(where)
    return type(dependency).__name__, names(dependency.name), getattr(dependency, "mode", None)


def _all(given: Iterable[str], names: BufferNumbers) -> Hashable:
    return tuple(map(names, given))


def _uses(buffer: Any, place: Mapping[int, int]) -> Hashable:
    """Return which of the loops use a buffer, and whether any other node does."""
    return tuple(sorted({(place.get(id(user.node), -1), user.is_weak, user.can_inplace) for user in buffer.users}))


def _buffer(name: str, names: BufferNumbers) -> Hashable:
    graph: Any = V.graph
    scheduler = graph.scheduler
    if name in graph.constants:
        return "constant", name
    buffer = graph.try_get_buffer(name)
    while isinstance(buffer, ir.MutableBox):
        buffer = buffer.data
    scheduled = scheduler.name_to_buf.get(name)
    flags = (
        *(name in each for each in (graph.graph_inputs, graph.removed_buffers, graph.inplaced_to_remove)),
        *(name in each for each in (graph.unaligned_buffers, graph.mutated_buffers)),
        *(name in each for each in (scheduler.mutation_renames, scheduler.name_to_donated_buffer)),
        (graph.is_unspec_arg(name), name.startswith("seed"), scheduled is None),
    )
    real = scheduler.mutation_real_name.get(name)
    return (
        (type(buffer).__name__, _layout(buffer, names)),
        flags,
        None if real is None else names(real),
        None if scheduled is None else (_all(scheduled.get_aliases(), names), _all(scheduled.get_mutations(), names)),
    )


def _layout(buffer: Any, names: BufferNumbers) -> Hashable:
    if not isinstance(buffer, ir.IRNode):
        return None
    layout = buffer.get_output_spec()
    target = None
    if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        target = names(layout.get_buffer().get_name())
        layout = layout.real_layout()
    if not isinstance(layout, ir.Layout):
        return type(layout).__name__, str(layout)
    where = tuple(map(sympy.sympify, (*layout.size, *layout.stride, layout.offset)))
    # Of a part of another buffer, the offset is not in its own layout; kernels are told whether it is aligned there.
    is_aligned = layout.maybe_guard_aligned() if isinstance(layout, ir.NonOwningLayout) else None
    return type(layout).__name__, str(layout.device), layout.dtype, where, target, is_aligned
