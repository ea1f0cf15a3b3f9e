"""The data flow of a plan, run on made-up values in an order that streams and events allow.

Independent of the checker, this shows what an unsafe plan does: another order, other results. Values are numbers that
depend on everything that went into them; memory is made of cells that buffers share as the plan lets them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from millstream.errors import PlanError
from millstream.graph import (
    Allocate,
    Free,
    Kernel,
    KernelGraph,
    Launch,
    MemoryLayout,
    Plan,
    Record,
    Role,
    Step,
    Wait,
)

Cell = tuple[str, int]
"""A piece of memory that buffers may share: what it is part of, and its number there."""

_NEW_FAVOURITES = 0.1  # per step: streams run as far ahead as they can for a while, then others do


def execute_graph(graph: KernelGraph) -> dict[str, int]:
    """Run the kernels in program order, every buffer in memory of its own.

    Returns:
        What inputs, states and outputs hold at the end, by buffer.
    """
    owners = dict.fromkeys(graph.storage_of.values())
    memory = _Memory(graph, {buffer: [("own", number)] for number, buffer in enumerate(owners)})
    for kernel in graph.kernels:
        memory.launch(kernel)
    return memory.results()


def execute_plan(plan: Plan, rng: random.Random, layout: MemoryLayout | None = None) -> dict[str, int]:
    """Run the steps of a plan in a random order that its streams and events allow.

    Some streams run far ahead while others lag behind, and the run is over as soon as stream 0 is: what is not joined
    to it may be left undone. Memory that one buffer frees is taken by the next that is allocated on that stream,
    whatever the sizes, so that a free that comes too early shows.

    Args:
        plan: A valid plan; see ``validate_plan``.
        rng: Source of all chance: the same state gives the same order.
        layout: Where temporaries lie in an arena; by default as the plan itself says, else each stream has a pool.

    Returns:
        What inputs, states and outputs hold at the end, by buffer: for a safe plan, in every order, the same as
        ``execute_graph`` returns.

    Raises:
        PlanError: A ``Wait`` on stream 0 can never end.
    """
    memory = _Memory(plan.graph, _place_in_cells(plan, layout or plan.layout))
    queues: list[list[Step]] = [[] for _ in range(plan.num_streams)]
    for step in reversed(plan.steps):
        queues[step.stream].append(step)
    recorded: set[int] = set()
    streams = rng.sample(range(plan.num_streams), plan.num_streams)
    while queues[0]:
        if rng.random() < _NEW_FAVOURITES:
            rng.shuffle(streams)
        queue = next((queues[s] for s in streams if queues[s] and _may_go_on(queues[s][-1], recorded)), None)
        if queue is None:
            raise PlanError(f"no stream of plan {plan.policy!r} can go on: record every event before it is waited for")
        step = queue.pop()
        if isinstance(step, Record):
            recorded.add(step.event)
        elif isinstance(step, Launch):
            memory.launch(plan.graph.kernels[step.kernel])
    return memory.results()


def _may_go_on(step: Step, recorded: set[int]) -> bool:
    return not isinstance(step, Wait) or step.event in recorded


class _Memory:
    """The contents of all cells."""

    def __init__(self, graph: KernelGraph, cells_of: dict[str, Sequence[Cell]]) -> None:
        self.graph = graph
        self.cells_of = cells_of
        self.contents: dict[Cell, int] = {}
        self.first_writer: dict[str, int] = {}
        for kernel in graph.kernels:
            for storage in graph.touched_by[kernel.id][1]:
                self.first_writer.setdefault(storage, kernel.id)
        self.number_of = {buffer.id: number for number, buffer in enumerate(graph.buffers)}
        for buffer in graph.buffers:
            if buffer.alias_of is None and buffer.role in (Role.INPUT, Role.STATE, Role.CONSTANT):
                self.first_writer[buffer.id] = -1
                self.write(buffer.id, hash((-1, self.number_of[buffer.id])))

    def read(self, storage: str) -> int:
        """Read a buffer: one value, unless another buffer has overwritten a part of it."""
        values = {self.contents.get(cell, 0) for cell in self.cells_of[storage]}
        return values.pop() if len(values) == 1 else hash(tuple(sorted(values)))

    def write(self, storage: str, value: int) -> None:
        for cell in self.cells_of[storage]:
            self.contents[cell] = value

    def add(self, storage: str, value: int) -> None:
        """Write a part of a buffer: whatever the order of such writes, the whole is the same."""
        for cell in self.cells_of[storage]:
            self.contents[cell] = self.contents.get(cell, 0) + value

    def launch(self, kernel: Kernel) -> None:
        """Write values that depend on the kernel, on all it reads, and on what it overwrites.

        A write may go through a view and leave the rest as it was, so it depends on the old value; only the first write
        of new memory does not.
        """
        reads, writes = self.graph.touched_by[kernel.id]
        values = tuple(map(self.read, reads))
        parts = [storage for storage in writes if self.graph.writes_part(kernel.id, storage)]
        old = tuple(self.read(storage) if self.first_writer[storage] != kernel.id else 0 for storage in writes)
        for storage in writes:
            if storage in parts:
                self.add(storage, hash((kernel.id, self.number_of[storage], values)))
            else:
                self.write(storage, hash((kernel.id, self.number_of[storage], values, old)))

    def results(self) -> dict[str, int]:
        kept = (Role.INPUT, Role.STATE, Role.OUTPUT)
        return {b.id: self.read(b.id) for b in self.graph.buffers if b.alias_of is None and b.role in kept}


def _place_in_cells(plan: Plan, layout: MemoryLayout | None) -> dict[str, Sequence[Cell]]:
    """Give every buffer its cells: bytes of the arena, or a block of a pool, or memory of its own."""
    cells_of: dict[str, Sequence[Cell]] = {
        buffer: [("own", number)] for number, buffer in enumerate(dict.fromkeys(plan.graph.storage_of.values()))
    }
    cells_of.update(_place_in_pools(plan))
    if layout is not None:
        cells_of.update(_place_in_arena(plan, layout))
    return cells_of


def _place_in_pools(plan: Plan) -> Iterable[tuple[str, Sequence[Cell]]]:
    """Do as the host would: take the block that the stream was given back last, or else a new one."""
    freed: dict[int, list[Cell]] = {}
    block_of: dict[str, Cell] = {}
    for position, step in enumerate(plan.steps):
        if isinstance(step, Free):
            freed.setdefault(step.stream, []).append(block_of[step.buffer])
            continue
        allocated: Iterable[str] = (step.buffer,) if isinstance(step, Allocate) else ()
        if isinstance(step, Launch):
            allocated = plan.graph.kernels[step.kernel].allocates
        for number, buffer in enumerate(allocated):
            pool = freed.get(step.stream)
            block_of[buffer] = pool.pop() if pool else (f"block {position}", number)
    return ((buffer, [block]) for buffer, block in block_of.items())


def _place_in_arena(plan: Plan, layout: MemoryLayout) -> Iterable[tuple[str, Sequence[Cell]]]:
    """Cut the arena wherever a buffer begins or ends."""
    size_of = {buffer.id: buffer.num_bytes for buffer in plan.graph.buffers}
    ranges = {buffer: (start, start + size_of[buffer]) for buffer, start in layout.offset_of.items() if size_of[buffer]}
    cuts = sorted({cut for pair in ranges.values() for cut in pair})
    for buffer, (start, end) in ranges.items():
        yield buffer, [("arena", low) for low, _ in pairwise(cuts) if start <= low < end]
