"""Plans made for tests: safe ones that no scheduler would make, and ways to break them."""

from __future__ import annotations

import random
from dataclasses import replace

from millstream.graph import (
    PLANNED_ROLES,
    Allocate,
    Free,
    KernelGraph,
    Launch,
    Plan,
    Record,
    Role,
    Step,
    Wait,
    derive_dependencies,
)


def spread_plan(graph: KernelGraph, num_streams: int, rng: random.Random) -> Plan:
    """Make a safe plan at random: kernels in any legal order, on any stream, with a wait for every dependency.

    It is the reference that scheduled plans and checkers are tried against, so it is simple rather than good: every
    launch is recorded, most waits say nothing new, and buffers are freed late or never.

    Args:
        graph: A valid graph.
        num_streams: How many streams to spread over.
        rng: Source of all chance: the same state gives the same plan.
    """
    return _SpreadPlan(graph, num_streams, rng).build()


def drop_step(plan: Plan, position: int) -> Plan:
    """Leave out the step at a position."""
    return replace(plan, steps=plan.steps[:position] + plan.steps[position + 1 :])


def swap_steps(plan: Plan, first: int, second: int) -> Plan:
    """Exchange the steps at two positions."""
    steps = list(plan.steps)
    steps[first], steps[second] = steps[second], steps[first]
    return replace(plan, steps=tuple(steps))


def move_step(plan: Plan, position: int, target: int) -> Plan:
    """Take the step at a position out, and put it back so that it stands at position ``target``."""
    steps = list(plan.steps)
    steps.insert(target, steps.pop(position))
    return replace(plan, steps=tuple(steps))


def restream_step(plan: Plan, position: int, stream: int) -> Plan:
    """Put the step at a position on another stream."""
    steps = list(plan.steps)
    steps[position] = replace(steps[position], stream=stream)
    return replace(plan, steps=tuple(steps))


class _SpreadPlan:
    """A plan in the making. Event ``k`` marks the end of kernel ``k``."""

    def __init__(self, graph: KernelGraph, num_streams: int, rng: random.Random) -> None:
        self.graph = graph
        self.num_streams = num_streams
        self.rng = rng
        self.role_of = {buffer.id: buffer.role for buffer in graph.buffers}
        self.predecessors = [{found.kernel for found in each} for each in derive_dependencies(graph)]
        self.touched = [graph.touched_by[kernel.id] for kernel in graph.kernels]
        self.users: dict[str, set[int]] = {}
        for kernel, (reads, writes) in enumerate(self.touched):
            for storage in (*reads, *writes):
                self.users.setdefault(storage, set()).add(kernel)
        self.steps: list[Step] = []
        self.stream_of: dict[int, int] = {}
        self.home_of: dict[str, int] = {}  # the stream that allocated a buffer

    def build(self) -> Plan:
        rng = self.rng
        remaining = set(range(len(self.graph.kernels)))
        while remaining:
            ready = sorted(kernel for kernel in remaining if not self.predecessors[kernel] & remaining)
            kernel = rng.choice(ready[:8])  # near program order, or nothing could be freed before the end
            remaining.remove(kernel)
            self.launch(kernel, rng.randrange(self.num_streams))
            self.free_some(kernel)
        for stream in range(1, self.num_streams):
            launched = [kernel for kernel, other in self.stream_of.items() if other == stream]
            self.wait(0, launched[-1:])
        return Plan(self.graph, tuple(self.steps), self.num_streams, "spread")

    def wait(self, stream: int, kernels: list[int]) -> None:
        self.steps.extend(Wait(kernel, stream) for kernel in kernels if self.stream_of[kernel] != stream)

    def launch(self, kernel: int, stream: int) -> None:
        self.wait(stream, sorted(self.predecessors[kernel]))
        for storage in self.touched[kernel][1]:
            if self.role_of[storage] in PLANNED_ROLES and storage not in self.home_of:
                self.home_of[storage] = stream
                if storage not in self.graph.kernels[kernel].allocates:
                    self.steps.append(Allocate(storage, stream))
        self.stream_of[kernel] = stream
        self.steps += [Launch(kernel, stream), Record(kernel, stream)]

    def free_some(self, kernel: int) -> None:
        """Free what the kernel was the last to use, or leave it to the end of the plan."""
        reads, writes = self.touched[kernel]
        for storage in dict.fromkeys((*reads, *writes)):
            users = self.users[storage]
            if self.role_of[storage] is Role.TEMPORARY and users <= self.stream_of.keys() and self.rng.random() < 0.8:
                self.wait(self.home_of[storage], sorted(users))
                self.steps.append(Free(storage, self.home_of[storage]))
