"""Put a graph that was cut at its collectives together again, as one program in which they are kernels.

**Contract**
- The program does what its segments do, run in order, with the collectives in between. Memory of the collectives is
  temporary: it lies in the arena, where other things lie before its first gradient is there and after its last use.
- A collective is one kernel, which reads and writes its memory. All of them read and write one buffer more, so that any
  schedule leaves them in the order in which they begin, which is that of all processes.
- Nothing else keeps kernels apart that were in different segments: a bucket travels as soon as its last gradient is
  there, while the rest of the backward pass is computed, and what a segment does with one bucket does not wait for
  another.

**Steps**
1. Give each value of a segment a name in the whole: of what crossed, that which its maker gave it; of a view of the
   collective's memory, that of a view.
2. Copy the kernels, names replaced. Kernels that write memory of a collective write parts of it, all but the first:
   others come after that one, from which on the memory is there.
3. After a segment put the collectives that begin then; some later (``pacing.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from millstream._torch.distributed.collectives import BoundCollective
from millstream._torch.tensors import ALIGNMENT_BYTES
from millstream.errors import LoweringError
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.lower.segmented.pacing import Travel, pace
from millstream.lower.segmented.segments import Segment, Segments
from millstream.program import KernelCall, Program, Renaming, TensorLayout, Value, View

COMMUNICATOR = "communicator"
"""The buffer without bytes that keeps collectives in order."""


def merge(
    name: str, segments: Segments, programs: Sequence[Program | None], exchanges: Sequence[BoundCollective]
) -> tuple[Program, tuple[int, ...]]:
    """Make one program of a graph that was cut.

    Args:
        name: Of the program.
        segments: Where it was cut.
        programs: One a segment; ``None`` where it has nothing to compute.
        exchanges: The collectives, as ``segments.keys`` count them.

    Returns:
        The program, and for each of its kernels which it was among those of the segments and the collectives, in order.

    Raises:
        LoweringError: Something crosses in a way that kernels of one program cannot use.
    """
    return _Merger(name, segments, exchanges).run(programs)


@dataclass
class _Whole:
    """The program so far."""

    kernels: list[Kernel] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    tensors: dict[str, TensorLayout] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    aligned: set[str] = field(default_factory=set)
    memories: set[str] = field(default_factory=set)  # of collectives
    written: set[str] = field(default_factory=set)  # of these, what kernels so far have

    def base(self, name: str) -> str:
        return self.views[name].base if name in self.views else name

    def add(self, kernel: Kernel, call: KernelCall) -> None:
        self.kernels.append(replace(kernel, id=len(self.kernels)))
        self.written |= self.memories.intersection(kernel.writes)
        self.calls.append(call)


class _Merger:
    def __init__(self, name: str, segments: Segments, exchanges: Sequence[BoundCollective]) -> None:
        self._name, self._segments, self._exchanges = name, segments, exchanges
        self._whole = _Whole()
        self._values: dict[int, str] = {}  # place in the segments' list of values -> name
        self._first_sent: list[int] = []  # of each collective, the place where the first of its values goes
        self._inputs: list[str | None] = [None] * segments.num_inputs
        self._copies: dict[int, int] = {}  # of collectives, positions of the kernels that copy their values
        self._travels: list[Travel] = []

    def run(self, programs: Sequence[Program | None]) -> tuple[Program, tuple[int, ...]]:
        self._add_memories()
        for segment, program in zip(self._segments.segments, programs, strict=True):
            self._add_inputs(segment, program)
        for number, (segment, program) in enumerate(zip(self._segments.segments, programs, strict=True)):
            if program is not None:
                _Copier(self._whole, f"s{number}_", self._bind(segment, program)).copy(program)
                self._note_results(segment, program, f"s{number}_")
            for collective, places in segment.brings:
                self._add_copy(collective, [self._values[place] for place in places])
            for collective in segment.starts:
                self._add_collective(collective)
        return self._finish()

    def _memory(self, collective: int) -> str:
        memory = self._exchanges[collective].memory
        return f"bucket{next(number for number, each in enumerate(self._exchanges) if each.memory is memory)}"

    def _result(self, collective: int) -> str | None:
        """The memory of its results, where that is another."""
        return None if self._exchanges[collective].result is None else f"{self._memory(collective)}_result"

    def _add_memories(self) -> None:
        place = self._segments.num_inputs
        device = str(self._exchanges[0].memory.device)
        self._whole.buffers[COMMUNICATOR] = Buffer(COMMUNICATOR, 0, device, Role.STATE)
        for collective, exchange in enumerate(self._exchanges):
            name, result = self._memory(collective), self._result(collective)
            self._add_memory(name, exchange.memory)
            self._whole.memories.add(name)
            if result is not None and exchange.result is not None:
                self._add_memory(result, exchange.result)
            self._first_sent.append(place + len(exchange.views))
            for base, parts in ((result or name, exchange.views), (name, exchange.sent)):
                memory = exchange.memory if base == name else exchange.result
                assert memory is not None
                for part in parts:
                    self._values[place] = f"{base}_{place}"
                    offset = int(part.storage_offset() - memory.storage_offset())
                    self._whole.views[f"{base}_{place}"] = View(base, tuple(part.shape), part.stride(), offset)
                    place += 1

    def _add_memory(self, name: str, memory: torch.Tensor) -> None:
        size = memory.numel() * memory.element_size()
        self._whole.buffers[name] = Buffer(name, size, str(memory.device), Role.TEMPORARY)
        self._whole.layouts[name] = TensorLayout(tuple(memory.shape), memory.stride(), memory.dtype, memory.device)

    def _bind(self, segment: Segment, program: Program) -> dict[str, str]:
        """The names in the whole of a segment's inputs."""
        bound: dict[str, str] = {}
        for place, name in zip(segment.inputs, program.inputs, strict=True):
            if name is None:
                continue
            if place not in self._values:
                raise LoweringError(f"{name} is no tensor and would have to cross a collective.", construct=name)
            bound[name] = whole = self._values[place]
            if name in program.aligned and place >= self._segments.num_inputs:
                self._check_aligned(whole, program.tensors[name].dtype)
        return bound

    def _add_inputs(self, segment: Segment, program: Program | None) -> None:
        """Add the inputs of the graph that a segment has, or that are exchanged after it."""
        for place, name in zip(segment.inputs, program.inputs if program is not None else (), strict=True):
            if name is None or program is None or place >= self._segments.num_inputs:
                continue
            whole = self._add_input(place, program.graph.buffer_of[name], program.tensors.get(name))
            if name in program.aligned:
                self._whole.aligned.add(whole)
        for collective, places in segment.brings:
            for place, part in zip(places, self._exchanges[collective].sent, strict=True):
                if place >= self._segments.num_inputs:
                    continue
                size = part.numel() * part.element_size()
                layout = TensorLayout(tuple(part.shape), part.stride(), part.dtype, part.device)
                self._add_input(place, Buffer("", size, str(part.device), Role.STATE), layout)

    def _add_input(self, place: int, buffer: Buffer, layout: TensorLayout | None) -> str:
        self._values[place] = self._inputs[place] = name = f"arg{place}"
        self._whole.buffers.setdefault(name, replace(buffer, id=name))
        if layout is not None:
            self._whole.tensors.setdefault(name, layout)
        return name

    def _check_aligned(self, name: str, dtype: torch.dtype) -> None:
        view = self._whole.views.get(name)
        if view is not None and view.offset * dtype.itemsize % ALIGNMENT_BYTES:
            raise LoweringError(f"{name} begins within another tensor, where kernels cannot read it.", construct=name)

    def _note_results(self, segment: Segment, program: Program, prefix: str) -> None:
        bound = dict(zip(program.inputs, segment.inputs, strict=True))
        for place, item in zip(segment.outputs, program.outputs, strict=True):
            if not isinstance(item, Value):
                raise LoweringError(f"{item!r} would have to cross a collective.", construct=str(item))
            source = bound.get(item.name)
            self._values[place] = f"{prefix}{item.name}" if source is None else self._values[source]

    def _add_copy(self, collective: int, sources: Sequence[str]) -> None:
        whole, memory = self._whole, self._memory(collective)
        first = self._first_sent[collective]
        views = [Value(self._values[first + index]) for index in range(len(sources))]
        kernel = Kernel(
            id=0,
            name="copy to what is exchanged",
            kind=KernelKind.COPY,
            device=whole.buffers[memory].device,
            reads=tuple(dict.fromkeys(map(whole.base, sources))),
            writes=(memory,),
            num_bytes=2 * sum(part.numel() * part.element_size() for part in self._exchanges[collective].sent),
        )
        self._copies[collective] = len(whole.kernels)
        whole.add(kernel, KernelCall(torch._foreach_copy_, (views, list(map(Value, sources))), {}))

    def _add_collective(self, collective: int) -> None:
        exchange, memory = self._exchanges[collective], self._memory(collective)
        buffer, result = self._whole.buffers[memory], self._result(collective)
        kernel = Kernel(
            id=0,
            name=f"exchange {exchange.label}",
            kind=KernelKind.COLLECTIVE,
            device=buffer.device,
            reads=(memory, COMMUNICATOR),
            writes=(result or memory, COMMUNICATOR),
            num_bytes=2 * buffer.num_bytes,
            ops=(exchange.operation,),
        )
        travel = Travel(len(self._whole.kernels), memory, self._copies.get(collective), exchange.is_paced)
        self._travels.append(travel)
        self._whole.add(kernel, KernelCall(exchange.perform, tuple(map(Value, filter(None, (memory, result)))), {}))

    def _finish(self) -> tuple[Program, tuple[int, ...]]:
        whole = self._whole
        outputs = [Value(self._output(item)) if is_place else item for is_place, item in self._segments.outputs]
        returned = tuple(whole.base(item.name) for item in outputs if isinstance(item, Value))
        inputs = tuple(self._inputs)
        bare = KernelGraph(self._name, (), tuple(whole.buffers.values()))
        owners = {bare.storage(name) for name in returned}
        buffers = tuple(_with_role(buffer, owners) for buffer in bare.buffers)
        kernels, order, marks = pace(whole.kernels, self._travels, bare.storage)
        buffers += tuple(Buffer(name, 0, kernels[0].device, Role.STATE) for name in marks)
        others = (buffer.id for buffer in buffers if buffer.role is Role.STATE and buffer.id not in inputs)
        graph = KernelGraph(
            name=self._name,
            kernels=tuple(kernels),
            buffers=buffers,
            inputs=(*(name for name in inputs if name is not None), *others),
            outputs=returned,
        )
        written = {graph.storage(name) for kernel in graph.kernels for name in kernel.writes}
        program = Program(
            graph=graph,
            calls=tuple(whole.calls[position] for position in order),
            inputs=inputs,
            outputs=tuple(outputs),
            views=whole.views,
            layouts=whole.layouts,
            constants=whole.constants,
            mutated=frozenset(name for name in inputs if name in written),
            aligned=frozenset(whole.aligned),
            tensors=whole.tensors,
        )
        return program, order

    def _output(self, place: int) -> str:
        if place not in self._values:  # an input that no kernel reads
            raise LoweringError(f"Result {place} is an input of the step as it was.", construct=self._name)
        return self._values[place]


class _Copier:
    """Copies the kernels of one segment."""

    def __init__(self, whole: _Whole, prefix: str, bound: dict[str, str]) -> None:
        self._whole, self._prefix, self._bound = whole, prefix, bound
        self._renaming = Renaming(prefix, bound, whole.views)

    def copy(self, program: Program) -> None:
        whole = self._whole
        for name, view in program.views.items():
            whole.views[self._prefix + name] = self._renaming.view(view)
        for buffer in program.graph.buffers:
            name = self._renaming.buffer(buffer.id)
            alias = None if buffer.alias_of is None else self._renaming.buffer(buffer.alias_of)
            whole.buffers.setdefault(name, replace(buffer, id=name, alias_of=alias))
        for table, entries in (
            (whole.layouts, program.layouts),
            (whole.tensors, program.tensors),
            (whole.constants, program.constants),
        ):
            table.update({self._prefix + name: entry for name, entry in entries.items() if name not in self._bound})  # type: ignore[attr-defined]
        for kernel, call in zip(program.graph.kernels, program.calls, strict=True):
            whole.add(self._kernel(kernel), self._call(call))

    def _kernel(self, kernel: Kernel) -> Kernel:
        reads, writes = self._renaming.buffers(kernel.reads), self._renaming.buffers(kernel.writes)
        exchanged = {self._whole.base(name) for name in self._bound.values() if name in self._whole.views}
        parts = [name for name in writes if name in exchanged & self._whole.written and name not in reads]
        return replace(
            kernel,
            reads=reads,
            writes=writes,
            allocates=self._renaming.buffers(kernel.allocates),
            parts=(*self._renaming.buffers(kernel.parts), *parts),
        )

    def _call(self, call: KernelCall) -> KernelCall:
        results = tuple((index, self._prefix + name) for index, name in call.results)
        return replace(self._renaming.arguments(call), results=results)


def _with_role(buffer: Buffer, returned: set[str]) -> Buffer:
    if buffer.role not in (Role.OUTPUT, Role.TEMPORARY):
        return buffer
    return replace(buffer, role=Role.OUTPUT if buffer.id in returned else Role.TEMPORARY)
