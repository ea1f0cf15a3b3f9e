"""Kernels that are equal but for the names of their buffers are generated once.

A network of twelve equal layers has twelve of each.

What Inductor generates for some loops depends on these, on the buffers' layouts, and on what else uses them
(``forms.py``). Where all of that has been met before in the graph, the code is taken again, and only the names are
bound anew (``bindings.py``). What is generated stays the same, to the letter. ``MILLSTREAM_WITHOUT=equal-kernels``
switches that off.

Private APIs of Inductor's code generation; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import config
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.wrapper import AllocateLine, ReuseLine
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from millstream._torch.workarounds import is_off, replaced
from millstream.lower.inductor.once.bindings import (
    Bound,
    Line,
    NotedArguments,
    Part,
    arguments_form,
    bind,
    inner_names,
    read_lines,
    write_lines,
)
from millstream.lower.inductor.once.equal_parts import SETS, TritonParts, state_of
from millstream.lower.inductor.once.forms import BufferNumbers, form_of, indices_form


@contextlib.contextmanager
def equal_kernels() -> Iterator[None]:
    """Generate equal kernels once inside the ``with`` block. Not for several threads at once."""
    if is_off("equal-kernels") or config.comment_origin:  # each says where it is from
        yield
        return
    graphs: WeakKeyDictionary[Any, dict[Hashable, _CppCode | None]] = WeakKeyDictionary()
    write = CppScheduling.codegen_node

    def write_once(self: Any, node: Any) -> None:
        _write_cpp(self, node, graphs.setdefault(self.scheduler, {}), write)

    triton = _TritonKernels(TritonParts())
    with (
        replaced(CppScheduling, "codegen_node", write_once),
        replaced(SIMDScheduling, "codegen_node_schedule", triton.write_whole),
        replaced(SIMDScheduling, "codegen_node_schedule_with_kernel", triton.write_loops),
        replaced(TritonKernel, "codegen_kernel", triton.write_source),
    ):
        yield


# --- C++ ---


@dataclass(frozen=True)
class _CppCode:
    """Code that loops have added to a C++ kernel, with numbers for the names of buffers.

    Attributes:
        bound: Its arguments.
        lines: In parts, some of which are the kernel's names for buffers; and the number of the buffer that a line is
            for, if it is left out where nothing needs that.
        order: In which the loops were scheduled.
        allocated: Buffers in the order in which they got their memory, which is another one where loops were written
            twice.
        placed: Buffers that have memory now, some of them of others.
        removed: Buffers that are not needed outside.
        replaced: Names that buffers written over do without.
        closes: Whether it ended the parallel region that was open.
        threads: Of the one that it left open, ``None`` for none.
        indent: At its end.
    """

    bound: Bound
    lines: tuple[Line, ...]
    order: tuple[int, ...]
    allocated: tuple[int, ...]
    placed: tuple[int, ...]
    removed: tuple[int, ...]
    replaced: tuple[int, ...]
    closes: bool
    threads: int | None
    indent: int


def _write_cpp(
    scheduling: Any, node: Any, known: dict[Hashable, _CppCode | None], write: Callable[[Any, Any], None]
) -> None:
    names, group = BufferNumbers(), scheduling.kernel_group
    nodes = node.get_nodes()
    try:
        form = form_of(nodes, names), _cpp_structure(node), _cpp_defaults(nodes, names)
    except Exception:  # noqa: BLE001  what private parts raise where a kernel is not of a known form: it has its own code
        write(scheduling, node)
        return
    key = (form, arguments_form(group.args, names), _region(group))
    code = known.get(key)
    if code is not None:
        _take_cpp(scheduling, nodes, code, [*names.number], [*names.offset])
        return
    noting = _CppNoting(group, nodes)
    write(scheduling, node)
    known[key] = noting.end(names)


def _cpp_structure(node: Any) -> Hashable:
    if not isinstance(node, OuterLoopFusedSchedulerNode):
        return type(node).__name__
    return node.outer_loop_fusion_depth, tuple(len(each.get_nodes()) for each in node.get_outer_nodes())


def _cpp_defaults(nodes: Sequence[Any], names: BufferNumbers) -> Hashable:
    """The loops as they were before they were simplified: it depends on them which are split."""
    found = []
    for node in nodes:
        if node.group[1][1]:  # none is split beside a sum
            return None
        sizes, body, _ = node.node.get_default_sizes_body()
        found.append((tuple(map(tuple, sizes)), tuple(body.iter_vars), indices_form(body, names)))
    return tuple(found)


def _region(group: Any) -> Hashable:
    return group.ws.num_threads if group.ws.in_parallel else None, group.loops_code._indent


class _CppNoting:
    """Notes what is added to a C++ kernel."""

    def __init__(self, group: Any, nodes: Sequence[Any]) -> None:
        graph: Any = V.graph
        self._group, self._nodes = group, nodes
        self._args = NotedArguments(group.args)
        self._line, self._num_nodes = len(group.loops_code._lines), len(group.scheduled_nodes)
        self._scope = next(iter(group.ws.stack._exit_callbacks), None)
        self._call, self._placed = len(graph.wrapper_code.lines), {*graph.wrapper_code.allocated}
        self._removed, self._replaced = {*graph.removed_buffers}, {*graph.inplaced_to_remove}

    def end(self, names: BufferNumbers) -> _CppCode | None:
        """Return what was added; ``None`` where that cannot be added again."""
        graph: Any = V.graph
        group, number = self._group, names.number
        place = {id(node): at for at, node in enumerate(self._nodes)}
        try:
            return _CppCode(
                self._args.end(names),
                tuple(read_lines(group.loops_code._lines[self._line :], group.args, names)),
                tuple(place[id(node)] for node in group.scheduled_nodes[self._num_nodes :]),
                tuple(number[_allocated(line)] for line in graph.wrapper_code.lines[self._call :]),
                tuple(number[name] for name in graph.wrapper_code.allocated if name not in self._placed),
                tuple(number[name] for name in graph.removed_buffers if name not in self._removed),
                tuple(number[name] for name in graph.inplaced_to_remove if name not in self._replaced),
                self._scope is not None and next(iter(group.ws.stack._exit_callbacks), None) is not self._scope,
                group.ws.num_threads if group.ws.in_parallel else None,
                group.loops_code._indent,
            )
        except Exception:  # noqa: BLE001  likewise
            return None


def _allocated(line: Any) -> str:
    """The buffer that gets its memory in a line of the program.

    Raises:
        KeyError: The line does something else.
    """
    if type(line) not in (AllocateLine, ReuseLine):
        raise KeyError(line)
    return (line.node if type(line) is AllocateLine else line.reused_as).get_name()  # type: ignore[no-any-return]


def _take_cpp(
    scheduling: Any, nodes: Sequence[Any], code: _CppCode, names: Sequence[str], offsets: Sequence[int]
) -> None:
    """Add what equal loops have added."""
    group = scheduling.kernel_group
    text, ws = group.loops_code, group.ws
    bind(group.args, code.bound, names, offsets)
    overwritten = {names[new]: names[old] for old, new in code.bound.in_place if new is not None}
    graph: Any = V.graph
    kernel: Any = SimpleNamespace(args=group.args, inplace_update_buffers=overwritten)
    with V.set_kernel_handler(kernel):
        for at in code.allocated:
            graph.scheduler.name_to_buf[names[at]].allocate()
        graph.removed_buffers |= [names[at] for at in code.removed]
        graph.inplaced_to_remove |= [names[at] for at in code.replaced]
        graph.wrapper_code.allocated |= [names[at] for at in code.placed]
    num_lines = len(text._lines)
    if code.closes:
        ws.close()
    if code.threads is not None:
        ws.parallel(code.threads)
    del text._lines[num_lines:]
    text._lines += write_lines(code.lines, group.args, names, offsets)
    text._indent = code.indent
    group.scheduled_nodes += [nodes[at] for at in code.order]
    if scheduling._get_scheduled_num_args() > CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM:
        scheduling._set_flush_status(True)


# --- Triton ---


@dataclass(frozen=True)
class _TritonCode:
    """A Triton kernel, with numbers for the names of buffers.

    Attributes:
        bound: Its arguments.
        source: In parts, some of which are places of elements.
        names: Of the sets of names that it has, which buffers are in them.
        others: What else is asked of it later.
    """

    bound: Bound
    source: tuple[Part, ...]
    names: Mapping[str, tuple[int, ...]]
    others: Mapping[str, Any]


_OTHERS = ("triton_meta", "inductor_meta", "num_load", "num_store", "num_reduction", "min_elem_per_thread")


class _TritonKernels:
    """The Triton kernels of the graphs that are compiled."""

    def __init__(self, parts: TritonParts) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, _TritonCode | None]] = WeakKeyDictionary()
        self._noted: WeakKeyDictionary[Any, Callable[[str], None]] = WeakKeyDictionary()
        self._sources: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._is_whole = False
        write_whole = SIMDScheduling.codegen_node_schedule
        write_loops = SIMDScheduling.codegen_node_schedule_with_kernel
        write_source = TritonKernel.codegen_kernel

        def write_whole_kernel(scheduling: Any, features: Any) -> None:
            self._is_whole = True  # and no part of another kernel, or one that is only tried
            try:
                write_whole(scheduling, features)
            finally:
                self._is_whole = False

        def write_or_take(scheduling: Any, schedule: Sequence[Any], kernel: Any) -> None:
            if type(kernel) is TritonKernel and getattr(kernel, "is_combo_kernel", False):
                parts.write(schedule, kernel, lambda: write_loops(scheduling, schedule, kernel))
            elif not self._is_whole or type(kernel) is not TritonKernel or not self._take(schedule, kernel):
                write_loops(scheduling, schedule, kernel)

        def take_source(kernel: Any, name: str | None = None) -> str:
            if kernel in self._sources:
                return self._sources.pop(kernel)
            source = write_source(kernel, name)
            if kernel in self._noted:
                self._noted.pop(kernel)(source)
            return source

        self.write_whole, self.write_loops, self.write_source = write_whole_kernel, write_or_take, take_source

    def _take(self, schedule: Sequence[Any], kernel: Any) -> bool:
        """Make a kernel what an equal one was before; otherwise note what it will be."""
        graph: Any = V.graph
        nodes = [node for node in schedule if isinstance(node, SchedulerNode)]
        marks = tuple(nodes.index(node) if isinstance(node, SchedulerNode) else node.__name__ for node in schedule)
        state = state_of(kernel)
        names = BufferNumbers()
        try:
            key = form_of(nodes, names), marks, state, config.benchmark_kernel
        except Exception:  # noqa: BLE001  likewise
            return False
        known = self._known.setdefault(graph.scheduler, {})
        code = known.get(key)
        if code is not None:
            self._sources[kernel] = _take_triton(kernel, code, [*names.number], [*names.offset])
            return True
        arguments = NotedArguments(kernel.args)

        def note(source: str) -> None:
            known[key] = _note_triton(kernel, source, arguments, names)

        self._noted[kernel] = note
        return False


def _note_triton(kernel: Any, source: str, arguments: NotedArguments, names: BufferNumbers) -> _TritonCode | None:
    """Return what a kernel has become; ``None`` where another cannot be made of that."""
    number = names.number
    with contextlib.suppress(Exception):  # likewise
        return _TritonCode(
            arguments.end(names),
            tuple(_read_source(source, kernel.args, names)),
            {kind: tuple(number[name] for name in getattr(kernel, kind)) for kind in SETS},
            {name: copy.deepcopy(getattr(kernel, name)) for name in _OTHERS},
        )
    return None


def _read_source(source: str, args: KernelArgs, names: BufferNumbers) -> Iterator[Part]:
    """The source of a kernel, apart where places of elements stand.

    Raises:
        KeyError: There is something in it that cannot be written for other buffers.
    """
    if re.search("|".join(rf"\b{re.escape(name)}\b" for name in names.number), source):
        raise KeyError(source)
    picked = [inner for _, inner, name in inner_names(args) if name in names.picked]
    if not picked:
        yield source
        return
    before, *rest = re.split(rf"(\b(?:{'|'.join(picked)}) \+ \()([^()]*)(?=\))", source)
    yield before
    for start, element, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if not element.isdecimal():
            raise KeyError(element)
        yield from (start, ("element", names.offset[int(element)]), after)


def _take_triton(kernel: Any, code: _TritonCode, names: Sequence[str], offsets: Sequence[int]) -> str:
    """Make a kernel what an equal one was; its source."""
    bind(kernel.args, code.bound, names, offsets)
    kernel.inplace_update_buffers |= {names[new]: names[old] for old, new in code.bound.in_place if new is not None}
    for kind, numbers in code.names.items():
        setattr(kernel, kind, OrderedSet(names[number] for number in numbers))
    for name, value in code.others.items():
        setattr(kernel, name, copy.deepcopy(value))
    return "".join(part if isinstance(part, str) else str(offsets[part[1]]) for part in code.source)
