"""The CUDA-graph engine: the whole plan is captured once and replayed by one call of the driver.

A graph reads and writes fixed addresses. So each input is either *static* (parameters, optimizer state: the graph uses
the user's own memory, whose address is checked in every call) or gets a *slot*, a tensor of ours into which the
caller's is copied. Outputs lie in the graph's memory and are cloned for the caller, who may keep them; with
``copy_outputs=False`` he gets that memory itself and must be done with it before the next call.

**First call, then capture.** The first call runs on the serial engine: it is the warm-up that capture needs
(autotuning, library handles), and because it *is* the user's call, nothing runs twice. Capturing launches nothing, so a
failed one changes nothing.

**Forward and backward.** What a forward pass saves for its backward pass is not cloned: it stays in the graph's memory
until the backward pass has used it. A forward call that comes while an earlier one still waits for its backward pass
must not overwrite it; it runs on the serial engine in fresh memory, and so does its backward pass. ``Family`` keeps the
two informed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from millstream.device import DeviceContext, context, guard
from millstream.engine.serial import SerialEngine
from millstream.engine.source import compile_plan
from millstream.errors import InternalError
from millstream.graph import Plan, Role
from millstream.lower import Lowered, Phase
from millstream.lower.program import Value
from millstream.lower.tensors import current_stream_handle, reinterpret, same_addresses, storage_view

#: After so many captures because parameters moved, they are copied into slots like any other input.
MAX_CAPTURES = 4


class Family:
    """What the forward and the backward program of one model tell each other."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()  # memory that stays in place between calls: saved activations, parameters
        self.replayed = False  # whether the latest forward call was a replay
        self.waiting: weakref.ref[torch.Tensor] | None = None  # alive while a replayed forward waits for its backward

    @property
    def occupied(self) -> bool:
        """Whether the forward graph's memory still holds what a backward pass may need."""
        return self.waiting is not None and self.waiting() is not None


class CudaGraphEngine:
    """Runs a plan as one CUDA graph.

    Args:
        lowered: What to run; every kernel on one CUDA device.
        plan: In which order.
        copy_outputs: Whether callers get their own copies of the outputs.
        family: Shared by the forward and backward program of one model.
        on_failure: Called once with the reason when capture fails; the serial engine goes on.
    """

    name = "graph"

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        *,
        copy_outputs: bool,
        family: Family,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.lowered, self.plan = lowered, plan
        self._serial = SerialEngine(lowered, plan)
        self._context: DeviceContext = context(next(iter(lowered.program.devices)))
        self._index = self._context.place.index
        self._copy_outputs, self._family, self._on_failure = copy_outputs, family, on_failure
        self._lock = self._context.graph_lock  # slots and the memory that graphs share serve one call at a time
        self._calls = self._captures = 0
        self._captured: _Captured | None = None

    @property
    def captured(self) -> bool:
        """Whether calls are replays by now."""
        return self._captured is not None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with self._lock:
            self._calls += 1
            captured = self._captured
            if captured is not None and captured.fits(inputs) and not self._must_not_overwrite():
                return self._replay(captured, inputs)
            if self._may_capture():
                self._captured = captured = None  # gives its memory back before taking more
                captured = self._capture(inputs)
                if captured is not None:
                    return self._replay(captured, inputs)
            if self.lowered.phase is Phase.FORWARD:
                self._family.replayed = False
            return self._serial(inputs)

    def replay(self) -> None:
        """Replay the graph on the inputs of the latest call, without copies in or out: for measurements."""
        if self._captured is None:
            raise InternalError(f"{self.lowered.program.graph.name} has not been captured yet.")
        self._captured.graph.replay()

    def release(self) -> None:
        """Give the graph's memory back; a later call captures anew."""
        with self._lock:
            self._captured = None

    def _must_not_overwrite(self) -> bool:
        return self.lowered.phase is Phase.FORWARD and self._family.occupied

    def _may_capture(self) -> bool:
        if self._calls == 1 or self._captures >= 2 * MAX_CAPTURES or self._must_not_overwrite():
            return False
        return self.lowered.phase is not Phase.BACKWARD or self._family.replayed

    def _capture(self, inputs: Sequence[Any]) -> _Captured | None:
        self._captures += 1
        try:
            with guard(self._context.place), self._context.capture_lock:
                self._captured = _Captured(self, inputs, fixed_state=self._captures <= MAX_CAPTURES)
        except (RuntimeError, torch.AcceleratorError) as error:
            self._captures = 2 * MAX_CAPTURES  # never again
            self._context.abandon_graph_pool()
            restore_generator(self._context)
            self._on_failure(error)
        return self._captured

    def _replay(self, captured: _Captured, inputs: list[Any]) -> list[Any]:
        if current_stream_handle(self._index) != self._context.graph_stream_handle:
            self._context.enter_graphs()
        if torch.cuda.current_device() == self._index:  # 0.1 µs, a guard 10
            outputs = captured.run(inputs)
        else:
            with guard(self._context.place):
                outputs = captured.run(inputs)
        if self.lowered.phase is Phase.FORWARD:
            self._family.replayed = True
            self._family.waiting = captured.watch(outputs)
        return outputs


def restore_generator(context: DeviceContext) -> None:
    """Let the device's random generator work again: a failed capture leaves it waiting for the capture's end."""
    with guard(context.place), context.capture_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty graph is what is wanted here
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass


class _Captured:
    """One capture: the graph, its slots and its outputs."""

    def __init__(self, engine: CudaGraphEngine, inputs: Sequence[Any], fixed_state: bool) -> None:
        program = engine.lowered.program
        self._program, self._phase = program, engine.lowered.phase
        copied = engine.lowered.visible if engine._copy_outputs else frozenset[int]()
        shared = len(copied) == len(program.outputs)
        device = torch.device(str(engine._context.place))
        memory: list[Any] = list(inputs)
        slots: list[tuple[int, torch.Tensor]] = []
        static: list[int] = []
        for position, name in enumerate(program.inputs):
            tensor = inputs[position]
            if name is None or not isinstance(tensor, torch.Tensor):
                continue
            if fixed_state and self._is_static(engine, name, tensor):
                static.append(position)
                continue
            memory[position] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            slots.append((position, storage_view(memory[position])))
        # A step holds the tensors it passes, so they cannot move; of everyone else's the addresses are checked.
        self._static = [] if self._phase is Phase.STEP else static
        self._addresses: list[int | None] = [None] * len(inputs)
        for position in static:
            self._addresses[position] = inputs[position].data_ptr()
        self._slot_positions = tuple(position for position, _ in slots)
        self._slots = [slot for _, slot in slots]
        self._overlapping = any(0 in slot.stride() for slot in self._slots)
        self._mutated = tuple(p for p in self._slot_positions if program.inputs[p] in program.mutated)
        self._copy_in(inputs)
        run = compile_plan(program, engine.plan)
        self.graph = torch.cuda.CUDAGraph()
        # Graphs may share memory only if nothing in it outlives a call (docs/decisions/0004).
        pool = engine._context.graph_pool if shared else None
        with torch.cuda.graph(
            self.graph,
            pool=pool,  # pyrefly: ignore[bad-argument-type]
            stream=engine._context.stream(0),  # type: ignore[arg-type]
            capture_error_mode="thread_local",
        ):
            outputs = run(list(memory))
        self._memory = memory  # the graph reads slots for as long as it exists
        self._outputs = [self._recipe(i, outputs[i], i in copied) for i in range(len(outputs))]
        if self._phase is Phase.FORWARD:
            saved = [
                t for i, t in enumerate(outputs) if i not in engine.lowered.visible and isinstance(t, torch.Tensor)
            ]
            engine._family.addresses = {tensor.data_ptr() for tensor in saved} | {
                a for a in self._addresses if a is not None
            }
        self._saved = next((i for i in range(len(outputs)) if i not in copied and self._owns(i)), None)

    def _is_static(self, engine: CudaGraphEngine, name: str, tensor: torch.Tensor) -> bool:
        if self._phase is Phase.BACKWARD:
            return tensor.data_ptr() in engine._family.addresses
        return self._program.graph.buffer_of[name].role is Role.STATE

    def fits(self, inputs: list[Any]) -> bool:
        """Whether every static input still lies where the graph expects it."""
        return same_addresses(inputs, self._addresses, self._static)

    def run(self, inputs: list[Any]) -> list[Any]:
        self._copy_in(inputs)
        self.graph.replay()
        for position in self._mutated:
            storage_view(inputs[position]).copy_(storage_view(self._memory[position]))
        outputs = [make(inputs) for make in self._outputs]
        inputs.clear()
        return outputs

    def watch(self, outputs: Sequence[Any]) -> weakref.ref[torch.Tensor] | None:
        """A reference that lives as long as autograd holds what this forward call saved."""
        return None if self._saved is None else weakref.ref(outputs[self._saved])

    def _owns(self, position: int) -> bool:
        """Whether an output lies in the graph's memory, rather than in an input's."""
        item = self._program.outputs[position]
        return isinstance(item, Value) and self._program.base(item.name) not in self._program.inputs

    def _copy_in(self, inputs: Sequence[Any]) -> None:
        sources = [inputs[position] for position in self._slot_positions]
        if self._overlapping:
            sources = [storage_view(source) for source in sources]
        if len(sources) > 1:
            torch._foreach_copy_(self._slots, sources)
        elif sources:
            self._slots[0].copy_(sources[0])

    def _recipe(self, position: int, output: Any, copy: bool) -> Callable[[Sequence[Any]], Any]:
        """How to make one output for the caller from his inputs and the graph's memory."""
        item = self._program.outputs[position]
        if not isinstance(item, Value):
            return lambda inputs: item
        base = self._program.base(item.name)
        if base in self._program.inputs:
            return self._input_recipe(item.name, self._program.inputs.index(base))
        if copy:
            return lambda inputs: output.clone()
        # A new tensor over the same memory in each call, so that its life tells how long it is needed.
        return lambda inputs: output.detach()

    def _input_recipe(self, name: str, position: int) -> Callable[[Sequence[Any]], Any]:
        view = self._program.views.get(name)
        if view is None:
            return lambda inputs: inputs[position]
        return lambda inputs: reinterpret(inputs[position], view.size, view.stride, view.offset)
