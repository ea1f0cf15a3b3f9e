"""Branches and loops within a CUDA graph: the device decides which bodies run, and how often.

A branch or a loop becomes a conditional node, whose bodies are captured once. A scan or map, which turns a known number
of times, is captured turn by turn, without a decision.

**Contract**
- What a body needs while it runs is its own: a stream for each stream that waits for it, so that whoever takes memory
that a body has left comes after it; and memory in a pool that lives as long as the graph.
- Results are made on the stream that waits, before the node, as those of any kernel; bodies fill them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream.device import DeviceContext
from millstream.device.cuda_graphs.conditional_nodes import ConditionalNodes, conditional_nodes, why_not_conditional
from millstream.engine.control import Compile, CompiledBody, Run, empty, make_runner, places_of, places_of_slices
from millstream.graph import Launch, Plan
from millstream.lower.control_flow import Body, Control, Flow
from millstream.program import Program, TensorLayout


def why_not_captured(control: Control) -> str:
    """Say in a few words why control flow cannot be a part of a CUDA graph; empty when it can."""
    if _may_draw(control):
        return "draws random numbers, and a graph must know how many it draws"
    reason = why_not_conditional() if _depth(control) else ""
    return f"is decided on the host: {reason}" if reason else ""


_DECIDED = frozenset({Flow.COND, Flow.WHILE_LOOP})  # what values decide


def _may_draw(control: Control) -> bool:
    """Whether values decide how many random numbers are drawn."""
    if control.flow in _DECIDED:
        return control.draws
    return any(_may_draw(each) for body in control.bodies for each in _flows_in(body.program))


def _depth(control: Control) -> int:
    """How many decisions lie within one another."""
    inner = max((_depth_of(body.program) for body in control.bodies), default=0)
    return inner + (control.flow in _DECIDED)


def _depth_of(program: Program) -> int:
    return max(map(_depth, _flows_in(program)), default=0)


def _flows_in(program: Program) -> list[Control]:
    return [call.target for call in program.calls if isinstance(call.target, Control)]


class CapturedFlows:
    """The control flow in one capture of a plan.

    Args:
        program: What is captured.
        plan: Of it, on one device.
        context: Of that device, which is current.
        compile_plan: Makes functions of bodies.

    Attributes:
        streams: Numbers of the streams that bodies are captured on; the first that the plan does not use.
    """

    def __init__(self, program: Program, plan: Plan, context: DeviceContext, compile_plan: Compile) -> None:
        waiting = {
            step.stream
            for step in plan.steps
            if isinstance(step, Launch) and isinstance(program.calls[step.kernel].target, Control)
        }
        num_streams = len(waiting) * _depth_of(program)
        self.streams = range(plan.num_streams, plan.num_streams + num_streams)
        self._context, self._index = context, context.place.index
        self._compile = functools.partial(compile_plan, flows=self.make)
        self._free = iter(self.streams)
        self._stream_of: dict[int, Any] = {}  # by the handle of the stream that waits
        self._nodes: ConditionalNodes | None = conditional_nodes(self._index) if num_streams else None
        self._pool: Any = torch.cuda.MemPool() if num_streams else None
        self._is_allocating = False

    def make(self, control: Control) -> Run:
        """Make what captures control flow on the current stream."""
        match control.flow:
            case Flow.COND:
                ways = [_Filling(each, control.results, self._compile) for each in control.bodies]
                return functools.partial(self._branch, control, ways)
            case Flow.WHILE_LOOP:
                goes_on, turn = control.bodies
                looks = _Filling(goes_on, [_flag(goes_on)], self._compile)
                return functools.partial(self._loop, control, looks, CompiledBody(turn, self._compile))
            case _:
                places = places_of_slices(control)
                bodies = [CompiledBody(body, self._compile, tuple(places.values())) for body in control.bodies]
                return make_runner(control, bodies, [*places])

    def _branch(self, control: Control, bodies: Sequence[_Filling], tensors: Sequence[Tensor]) -> list[Tensor]:
        decides, *operands = tensors
        results = [empty(layout) for layout in control.results]
        decides = decides if decides.dtype == torch.bool else decides != 0
        assert self._nodes is not None
        graphs = self._nodes.branch(current_stream_handle(self._index), decides.data_ptr())
        for body, graph in zip(bodies, graphs, strict=True):
            with self._within(graph):
                body.fill(operands, results)
        return results

    def _loop(self, control: Control, goes_on: _Filling, turn: CompiledBody, tensors: Sequence[Tensor]) -> list[Tensor]:
        num_carried = control.num_carried
        others = tensors[num_carried:]
        carried = [empty(layout) for layout in control.results]
        _copy_each(carried, tensors[:num_carried])
        flag = empty(goes_on.results[0])
        goes_on.fill([*carried, *others], [flag])
        assert self._nodes is not None
        handle, graph = self._nodes.loop(current_stream_handle(self._index), flag.data_ptr())
        with self._within(graph):
            _copy_each(carried, turn([*carried, *others]))
            goes_on.fill([*carried, *others], [flag])
            self._nodes.decide(handle, current_stream_handle(self._index), flag.data_ptr())
        return carried

    @contextmanager
    def _within(self, graph: int) -> Iterator[None]:
        """Capture a body, on a stream of its own."""
        waiting = current_stream_handle(self._index)
        if waiting not in self._stream_of:
            self._stream_of[waiting] = self._context.streams[next(self._free)]
        stream = self._stream_of[waiting]
        assert self._nodes is not None
        with self._allocating(), self._nodes.body(graph, stream.cuda_stream), self._context.on(stream):
            yield

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Let memory for what is captured now be taken from the pool; for a body within a body it is already."""
        if self._is_allocating:
            yield
            return
        self._is_allocating = True
        try:
            with torch.cuda.use_mem_pool(self._pool, self._context.torch_device):
                yield
        finally:
            self._is_allocating = False


class _Filling:
    """A body that fills memory that is there."""

    def __init__(self, body: Body, results: Sequence[TensorLayout], compile_plan: Compile) -> None:
        self.results = results
        wanted = {place: (each.size, each.stride, each.dtype) for place, each in enumerate(results)}
        self._places = places_of(body, wanted)
        self._run = CompiledBody(body, compile_plan, tuple(self._places.values()), copies=False)

    def fill(self, given: Iterable[Tensor], results: Sequence[Tensor]) -> None:
        made = self._run([*given, *(results[place] for place in self._places)])
        left = [place for place in range(len(results)) if place not in self._places]
        _copy_each([results[place] for place in left], [made[place] for place in left])


def _flag(body: Body) -> TensorLayout:
    """The layout of what tells whether a loop goes on: a byte."""
    (made,) = body.made
    return TensorLayout(made.size, made.stride, torch.bool, made.device)


def _copy_each(to: list[Tensor], source: Sequence[Tensor]) -> None:
    for each, value in zip(to, source, strict=True):
        each.copy_(value)
