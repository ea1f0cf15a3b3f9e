"""One capture of a program: the CUDA graph, its slots and its outputs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.tensors import (
    allocator,
    copy_elements,
    same_addresses,
    spanned_bytes,
    storage_view,
)
from millstream.device import DeviceContext
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.cuda_graphs.spread import spread_kernels
from millstream.device.cuda_graphs.workspaces import take_workspaces
from millstream.device.drivers.driver import GraphPool
from millstream.engine.arena import Arena, User, bind_arena, bind_buffers, lay_out, view_memory
from millstream.engine.control import rehearse
from millstream.engine.cuda.batched_copy import make_batched_copy
from millstream.engine.cuda.captured_flows import CapturedFlows
from millstream.engine.cuda.graph_io import GraphIO, make_graph_io
from millstream.engine.cuda.plan_devices import PlanDevices
from millstream.engine.plan_source import compile_plan
from millstream.graph import Plan, Role, Spread
from millstream.kernels.early_loads import early_loads
from millstream.lower import Lowered, Phase
from millstream.program import TensorLayout, Value


class ProgramPair:
    """Facts that the forward and the backward program of one model share."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()  # memory that stays in place between calls: saved activations, parameters
        self.saved: frozenset[int] = frozenset()  # of these, what the forward graph saves in its own memory
        self.replayed = False  # whether the latest forward call was a replay
        self.waiting: weakref.ref[torch.Tensor] | None = None  # alive while a replayed forward waits for its backward

    @property
    def occupied(self) -> bool:
        """Whether the forward graph's memory still holds what a backward pass may need."""
        return self.waiting is not None and self.waiting() is not None

    def saved_by_graph(self, inputs: Sequence[Any]) -> bool:
        """Return whether a backward pass with these inputs belongs to a replay of the forward graph."""
        if not self.saved:
            return self.replayed
        return self.saved.issubset([each.data_ptr() for each in inputs if isinstance(each, torch.Tensor)])


class Captured:
    """A plan captured as a CUDA graph.

    Args:
        lowered: What to run.
        plan: On which streams; where it has no layout, PyTorch's allocator places the temporaries.
        inputs: Of the call that captures; the graph uses the memory of those that stay in place.
        context: Of the device, which is current.
        family: Shared by the forward and backward program of one model.
        copied: Positions of the outputs that callers get as their own copies.
        fixed_state: Whether parameters stay where they are.
        pool: Memory that the graph shares with others; ``None`` for its own.
        arena: Where slots, temporaries and outputs are to lie, if not in memory of their own.
        user: Told when the arena takes its memory back: the capture may not be run any more then.
        devices: Where the plan is on several devices: their streams and memory.

    Attributes:
        graph: The CUDA graph.
        slot_positions: Inputs that are copied into slots.
        streams: Handles of the streams for which slots are kept from others until they have replayed the graph.
        saved: Addresses in the graph's memory of what a forward pass saves for its backward pass.
        written: Inputs that the graph writes, where it does: slots, and static ones.
        object_bytes: What the device lacks since the graph was made, beside PyTorch's memory.
    """

    def __init__(  # noqa: PLR0913  all but the first by name
        self,
        lowered: Lowered,
        plan: Plan,
        inputs: Sequence[Any],
        *,
        context: DeviceContext,
        family: ProgramPair,
        copied: frozenset[int],
        fixed_state: bool,
        pool: GraphPool | None,
        arena: Arena | None = None,
        user: User | None = None,
        devices: PlanDevices | None = None,
    ) -> None:
        program = lowered.program
        self._arena, self._token, self.object_bytes = arena, object(), 0
        self._devices, self._bound = devices, devices.bind() if devices is not None else None
        self._program, self._phase, self._family = program, lowered.phase, family
        self._plan, self._context, self._copied = plan, context, copied
        self._whole: torch.Tensor | None = None
        device = context.torch_device
        memory: list[Any] = list(inputs)
        moving: list[int] = []
        static: list[int] = []
        for position, name in enumerate(program.inputs):
            tensor = inputs[position]
            if name is None or not isinstance(tensor, torch.Tensor):
                continue
            if fixed_state and self._is_static(name, tensor):
                static.append(position)
                continue
            moving.append(position)
        if arena is None or user is None:
            for position in moving:
                tensor = inputs[position]
                memory[position] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            self._bound = self._take(arena, user, moving, memory)
        slots = [(position, storage_view(memory[position])) for position in moving]
        # A step holds the tensors it passes, so they cannot move; of everyone else's the addresses are checked.
        self._static = [] if self._phase is Phase.STEP else static
        self._addresses: list[int | None] = [None] * len(inputs)
        for position in static:
            self._addresses[position] = inputs[position].data_ptr()
        self.slot_positions = tuple(position for position, _ in slots)
        self._slots = [slot for _, slot in slots]
        self.streams = {current_stream_handle(context.place.index)}  # of which they are
        self._overlapping = any(0 in slot.stride() for slot in self._slots)
        self._incoming = make_batched_copy(self._slots)
        self._mutated = tuple(p for p in self.slot_positions if program.inputs[p] in program.mutated)
        self.written = tuple(memory[p] for p in (*static, *moving) if program.inputs[p] in program.mutated)
        self.copy_in(inputs)
        self._memory = memory  # the graph reads slots for as long as it exists
        graph_io = None if self._overlapping else make_graph_io(self._slots, [inputs[p] for p in self.slot_positions])
        outputs = self._capture(list(memory), pool, graph_io)
        if self._phase is Phase.FORWARD:
            saved = [t for i, t in enumerate(outputs) if i not in lowered.visible and isinstance(t, torch.Tensor)]
            self.addresses = {tensor.data_ptr() for tensor in saved} | {a for a in self._addresses if a is not None}
        # What the caller gets may be dropped long before, even where it is not his own copy.
        own = [i for i in range(len(outputs)) if i not in lowered.visible and self._owns(i)]
        self.saved = frozenset(outputs[i].data_ptr() for i in own)
        self._saved = next(iter(own), None)

    def _take(self, arena: Arena, user: User, moving: Sequence[int], memory: list[Any]) -> dict[str, torch.Tensor]:
        """Put slots for the inputs at some positions into the arena, and the plan's buffers, which are returned."""
        program, device = self._program, self._context.torch_device
        layouts = [TensorLayout(tuple(t.shape), t.stride(), t.dtype, device) for t in map(memory.__getitem__, moving)]
        sizes = [spanned_bytes(memory[position]) for position in moving]
        space = lay_out(program, self._plan, sizes)
        whole = arena.take(space.num_bytes, device, user)
        arena.latest = None
        self._context.graphs.enter()  # after those that use it on other streams
        if whole.is_cuda:
            whole.record_stream(torch.cuda.current_stream(device))  # it may have been taken on another one
        for position, layout, offset, num_bytes in zip(moving, layouts, space.slots, sizes, strict=True):
            memory[position] = view_memory(whole, offset, num_bytes, layout)
        self._whole = whole
        return {**bind_arena(program, space.temporaries, whole), **bind_buffers(program, space.outputs, whole)}

    @property
    def is_latest(self) -> bool:
        """Whether what it holds is of its own latest run: an arena may have served another capture since."""
        return self._arena is None or self._arena.latest is self._token

    @property
    def inputs(self) -> list[Any]:
        """What the graph reads: slots, and inputs that stay where they are."""
        return list(self._memory)

    def read_in_place(self, inputs: Sequence[Any], positions: frozenset[int]) -> Captured:
        """Capture the plan once more so that it reads some inputs, of those with slots, where they are in this call.

        The result shares the other slots, and the memory of temporaries: the two never run at the same time. It does
        not keep the inputs alive. It may be run only in calls that this capture fits and whose inputs at ``positions``
        are where they are now, and only while this capture exists.
        """
        other = copy.copy(self)
        other._token = object()  # it leaves some slots as they are
        slots = [pair for pair in zip(self.slot_positions, self._slots, strict=True) if pair[0] not in positions]
        other.slot_positions, other._slots = tuple(position for position, _ in slots), [slot for _, slot in slots]
        other._incoming = make_batched_copy(other._slots)
        memory = [inputs[i] if i in positions else item for i, item in enumerate(self._memory)]
        other._capture(memory, self.graph.pool(), None)
        return other

    def _capture(self, memory: list[Any], pool: GraphPool | None, graph_io: GraphIO | None) -> list[Any]:
        """Capture the plan on these inputs; the list is emptied, and the outputs returned as the graph has them."""
        program, plan, context = self._program, self._plan, self._context
        is_spread = plan.spread is not Spread.PACKED
        is_kept = graph_io is not None or is_spread  # until it is instantiated here
        rehearse(program, compile_plan)
        self._flows = CapturedFlows(program, plan, context, compile_plan)  # whose memory the graph uses
        if self._devices is None:
            take_workspaces(context, program, (*range(plan.num_streams), *self._flows.streams))
        else:
            self._devices.take_workspaces(self._flows.streams)
        lacking_bytes = _lacking_bytes(context)
        self.graph = torch.cuda.CUDAGraph(keep_graph=is_kept)
        with capture(context, self.graph, pool):
            if graph_io is not None:
                graph_io.lead_in()
            if plan.num_streams > 2:
                # CUDA starts branches that begin at nothing one by one, about 3 µs apart, but all that one kernel is
                # followed by nearly at once (docs/decisions/cuda-graphs.md).
                torch.ones(1, device=context.torch_device)
            bound = self._bound
            if bound is None and plan.layout is not None:
                bound = bind_arena(program, plan.layout)
            elsewhere = {} if self._devices is None else self._devices.elsewhere
            how: dict[str, Any] = {"repeats": True, "elsewhere": elsewhere, "flows": self._flows.make}
            run = compile_plan(program, plan, bound, context=context, **how)
            try:
                with nullcontext() if self._devices is None else self._devices.allocating(), early_loads(self._slots):
                    outputs = run(memory)
            finally:
                for lender, event in run.events:
                    lender.events.release(event)
            self._handed_out = [i for i in range(len(outputs)) if i in self._copied and self._owns(i)]
            self._results = [outputs[i] for i in self._handed_out]
            leads_out = graph_io is not None and graph_io.lead_out(self._results)
        if is_spread:
            from millstream.kernels.registry import is_generated  # and with it Inductor, which by now is there

            spread_kernels(self.graph, context.torch_device, plan.spread, is_generated)
        if is_kept:
            with context.capture_lock:
                self.graph.instantiate()
        self.object_bytes = max(_lacking_bytes(context) - lacking_bytes, 0)
        if graph_io is not None:
            graph_io.settle(self.graph)
        self._outgoing = make_batched_copy(self._results)
        self._graph_io = graph_io if leads_out and (self._outgoing or not self._results) else None
        self._outputs = [self._recipe(i, output) for i, output in enumerate(outputs)]
        return outputs

    def _is_static(self, name: str, tensor: torch.Tensor) -> bool:
        if self._phase is Phase.BACKWARD:
            return tensor.data_ptr() in self._family.addresses
        return self._program.graph.buffer_of[name].role is Role.STATE

    def fits(self, inputs: list[Any]) -> bool:
        """Return whether every static input still lies where the graph expects it."""
        return not self._static or same_addresses(inputs, self._addresses, self._static)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run a call: the list of inputs is emptied, the list of outputs returned."""
        outputs = self.make_outputs(inputs)  # first of all: memory may be short, and nothing has changed yet
        if self._arena is not None:
            self._arena.latest = self._token
        graph_io = self._graph_io
        if graph_io is not None:
            if graph_io.open([inputs[p] for p in self.slot_positions], [outputs[i] for i in self._handed_out]):
                self.graph.replay()
                self._copy_back(inputs)
                return outputs
            if graph_io.is_shut:
                self._graph_io = None
        self.copy_in(inputs)
        self.replay()
        return self.finish(inputs, outputs)

    def replay(self) -> None:
        """Launch the graph on the current stream, on what lies in its slots."""
        if self._graph_io is not None:
            self._graph_io.close()
        self.graph.replay()

    def serve(self, stream: torch.cuda.Stream) -> None:
        """Keep slots, when they are given back, from other streams until this one has replayed the graph."""
        self.streams.add(stream.cuda_stream)
        for slot in [self._whole] if self._whole is not None else self._slots:
            slot.record_stream(stream)

    def make_outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what the caller gets; what is copied for it is filled when the call is finished."""
        return [make(inputs) for make in self._outputs]

    def finish(self, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        """Fill outputs, copy back what a replay wrote to inputs, and empty the inputs' list."""
        copies = [outputs[i] for i in self._handed_out]
        if copies and (self._outgoing is None or not self._outgoing.fetch(copies)):
            torch._foreach_copy_(copies, self._results)
        self._copy_back(inputs)
        return outputs

    def _copy_back(self, inputs: list[Any]) -> None:
        for position in self._mutated:
            copy_elements(inputs[position], self._memory[position])
        inputs.clear()

    def watch(self, outputs: Sequence[Any]) -> weakref.ref[torch.Tensor] | None:
        """A reference that lives as long as autograd holds what this forward call saved."""
        return None if self._saved is None else weakref.ref(outputs[self._saved])

    def _owns(self, position: int) -> bool:
        """Return whether an output lies in the graph's memory, rather than in an input's."""
        item = self._program.outputs[position]
        return isinstance(item, Value) and self._program.base(item.name) not in self._program.inputs

    def copy_in(self, inputs: Sequence[Any]) -> None:
        """Copy inputs into their slots."""
        sources = [inputs[position] for position in self.slot_positions]
        if self._overlapping:
            sources = [storage_view(source) for source in sources]
        if self._incoming is not None and self._incoming.bring(sources):
            return
        if len(sources) > 1:
            torch._foreach_copy_(self._slots, sources)
        elif sources:
            self._slots[0].copy_(sources[0])

    def _recipe(self, position: int, output: Any) -> Callable[[Sequence[Any]], Any]:
        """Return how to make one output for the caller from his inputs and the graph's memory."""
        item = self._program.outputs[position]
        if not isinstance(item, Value):
            return lambda inputs: item
        base = self._program.base(item.name)
        if base in self._program.inputs:
            return self._input_recipe(item.name, self._program.inputs.index(base))
        if position in self._copied and self._outgoing is None:
            return lambda inputs: torch.empty_like(output)
        if position in self._copied:
            size, stride, allocate = tuple(output.shape), output.stride(), allocator(output.device)
            return lambda inputs: allocate(size, stride, output.dtype)
        # A new tensor over the same memory in each call, so that its life tells how long it is needed.
        return lambda inputs: output.detach()

    def _input_recipe(self, name: str, position: int) -> Callable[[Sequence[Any]], Any]:
        view = self._program.views.get(name)
        if view is None:
            return lambda inputs: inputs[position]
        return lambda inputs: view.of(inputs[position])


def _lacking_bytes(context: DeviceContext) -> int:
    """Bytes of a device that are neither free nor held by PyTorch's allocator."""
    index = context.place.index
    with context.capture_lock:
        free, total = torch.cuda.mem_get_info(index)
        return total - free - torch.cuda.memory_reserved(index)
