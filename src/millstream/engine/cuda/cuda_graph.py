"""The CUDA-graph engine: the whole plan is captured once and replayed by one call of the driver.

A graph reads and writes fixed addresses. So each input is either *static* (parameters, optimizer state: the graph uses
the user's own memory, whose address is checked in every call) or gets a *slot*, a tensor of its own into which the
caller's is copied. Outputs lie in the graph's memory and are cloned for the caller, which may keep them; with
``copy_outputs=False`` it gets that memory itself and must be done with it before the next call.

**First call, then capture.** The first call runs on the serial engine: it is the warm-up that capture needs
(autotuning, library handles), and because it *is* the user's call, nothing runs twice. Meanwhile the kernels are
measured. The next call chooses the plan: the candidates are captured and timed on the caller's data, what they wrote is
put back, and the fastest is captured for good. Capturing launches nothing, so a failed one changes nothing. Libraries'
handles are each thread's own, and cannot be made while a graph is captured: so a thread captures only what it has run.

**In place.** Inputs that lie at a few addresses in turn, as batches from a feeder do, are not copied for long: for each
of these addresses the plan is captured once more, to read them there (``replayer.py``).

**Forward and backward.** What a forward pass saves for its backward pass is not cloned: it stays in the graph's memory
until the backward pass has used it. A forward call that comes while an earlier one still waits for its backward pass
must not overwrite it; it runs on the serial engine in fresh memory, and so does its backward pass. ``ProgramPair``
keeps the two informed.

**PyTorch's switches.** A graph goes on under those that it was captured with. Whoever has it run for others builds
another one; but a backward pass may find a switch that was changed after its forward pass, and another thread may
change one while a graph is captured. Then the call runs on the serial engine.

**Within a capture of the caller's.** A graph cannot be launched there. The call runs on the serial engine, and its
kernels become a part of the caller's graph.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.modes.switches import present
from millstream.cost import Costs
from millstream.device import DeviceContext, context, guard
from millstream.device.cuda_graphs.capturing import repair
from millstream.device.drivers.driver import GraphPool
from millstream.engine.arena import Arena
from millstream.engine.cuda import graph_io
from millstream.engine.cuda.captured import Captured, ProgramPair
from millstream.engine.cuda.replayer import Replayer, bytes_in_place
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.planning.background import Background
from millstream.engine.planning.planner import Planner
from millstream.engine.planning.trial import Trials
from millstream.engine.unchanged import replays_unchanged, unchanged
from millstream.errors import DeviceError, InternalError, PlanError
from millstream.graph import Candidate, Plan
from millstream.lower import Lowered, Phase
from millstream.schedule import Scheduling, peak_bytes
from millstream.schedule.choose import CandidatePlan

#: After so many captures because parameters moved, they are copied into slots like any other input.
MAX_CAPTURES = 4

#: Free memory of the device, in peaks of a plan, with which a capture surely finds room: trials keep two graphs, too.
ROOM = 4


class CudaGraphEngine(Engine):
    """Runs a plan as one CUDA graph.

    Args:
        lowered: What to run; every kernel on one CUDA device.
        plan: Its plan on one stream.
        copy_outputs: Whether callers get their own copies of the outputs.
        family: Shared by the forward and backward program of one model.
        scheduling: Which other plans to consider.
        chosen: The plan that is to run, where that is known already.
        arena: Memory that it has in turn with others, as far as nothing in it outlives a call.
        is_warm: Whether this thread has run the program's kernels on tensors of these sizes.
        warn: Told why it is not what was asked for: nothing can be captured, and the serial engine continues, or one
            stream does. It may raise; nothing of a call has run then.

    Attributes:
        plan: What runs: the one-stream plan until another one has been chosen.
        gives_memory_back: The pool that all graphs of a place share keeps memory for the next of them.
    """

    name = "graph"

    def __init__(  # noqa: PLR0913  all but the first by name
        self,
        lowered: Lowered,
        plan: Plan,
        *,
        copy_outputs: bool,
        family: ProgramPair,
        scheduling: Scheduling,
        chosen: Plan | None = None,
        arena: Arena | None = None,
        is_warm: bool = False,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(lowered, chosen or plan)
        self._serial = SerialEngine(lowered, plan)
        self._switches = present()
        self._context: DeviceContext = context(next(iter(lowered.program.devices)))
        self._index = self._context.place.index
        self._copied = lowered.visible if copy_outputs else frozenset[int]()
        self._family, self._warn = family, warn
        self._settled = scheduling.serial or chosen is not None
        self._planner = None if self._settled else Planner(lowered, plan, self._context, scheduling)
        self._arena = arena if len(self._copied) == len(lowered.program.outputs) else None
        # Other phases have memory that is not theirs alone: they choose at once.
        self._tunes_later = scheduling.tune == "background" and lowered.phase in (Phase.STEP, Phase.INFERENCE)
        self._tuning: Background[CandidatePlan | None] | None = None
        self._lock = self._context.graphs.lock  # slots and the memory that graphs share serve one call at a time
        self._thread = threading.local()  # has ``warm`` once it has run the program
        self._thread.warm = is_warm
        self._captures = 0  # since there was last nothing captured, or memory was given back
        self._refused = False  # whether nothing can be captured
        self._lesser: tuple[str, Exception] | None = None  # what it came to and why, to be told once it is captured
        self._captured: Captured | None = None
        self._replayer: Replayer | None = None  # of the present capture, where inputs may be read in place
        self._may_read_in_place = True

    @property
    def is_settled(self) -> bool:
        return self._settled or self._tunes_later

    @property
    def shares_memory(self) -> bool:
        return self._arena is not None

    @property
    def object_bytes(self) -> int:
        return 0 if self._captured is None else self._captured.object_bytes

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    @property
    def num_in_place(self) -> int:
        return self._replayer.num_graphs if self._replayer else 0

    @property
    def costs(self) -> Costs | None:
        return self._planner.costs if self._planner else None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._planner.candidates if self._planner else ()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with self._lock:
            if self._context.is_capturing():  # a graph of the caller's own, of which the kernels become a part
                return self._run_serially(inputs, may_measure=False)
            if self._arena is not None and not self._arena.serves(current_stream_handle(self._index)):
                self._drop()
                self._arena = None
            if self.lowered.phase is Phase.BACKWARD and present() is not self._switches:
                return self._run_serially(inputs, may_measure=False)
            captured = self._captured
            if captured is not None and captured.fits(inputs) and not self._must_not_overwrite():
                outputs = self._replay(captured, inputs)
                if self._tunes_later and not self._settled:
                    self._tune()
                return outputs
            if self._may_capture(inputs):
                captured = None
                self._drop()  # gives its memory back before taking more
                captured = self._capture(inputs)
                if captured is not None and present() is self._switches:
                    return self._replay(captured, inputs)
                captured = None
                self._drop()
            return self._run_serially(inputs)

    def run_uncaptured(self, inputs: list[Any]) -> list[Any]:
        with self._lock:
            return self._run_serially(inputs, may_measure=False)

    def replay(self) -> None:
        with self._lock, guard(self._context.place):
            captured = self._latest()
            self._context.graphs.enter()  # another thread may have run another graph since
            captured.replay()

    def why_not_replay(self) -> str:
        if self._captured is None:
            return "nothing is captured yet: call it once more"
        if not self._captured.is_latest:
            return "another size has run since in the same memory: call it once more"
        return "a backward pass still needs what its forward pass saved" if self._must_not_overwrite() else ""

    @contextmanager
    def replays_unchanged(self) -> Iterator[Callable[[], None]]:
        with self._lock, guard(self._context.place):
            captured = self._latest()
            self._context.graphs.enter()
            captured.serve(torch.cuda.current_stream(self._index))
            generator = torch.cuda.default_generators[self._index]
            with replays_unchanged(self.lowered.program, captured.written, generator, captured.replay) as replay:
                yield replay

    def capture_beside(self, plan: Plan) -> Captured:
        """Capture another plan, on copies of the inputs that the present graph holds: for measurements."""
        with self._lock, guard(self._context.place):
            return self._try(plan, self._latest().inputs, None)

    def _latest(self) -> Captured:
        """Return what is captured, with the inputs of its latest call in its slots."""
        if self._captured is None:
            raise InternalError(f"{self.lowered.program.graph.name} has not been captured yet.")
        if not self._captured.is_latest:
            raise InternalError(f"Another size has run since in the memory of {self.lowered.program.graph.name}.")
        return self._captured

    def release(self) -> None:
        """Give the graph's memory back; a later call captures again."""
        with self._lock:
            self._drop()
            self._captures = 0

    def _drop(self) -> None:
        if self._replayer is not None:
            self._replayer.stop()
        self._captured = self._replayer = None
        if self._arena is not None:
            self._arena.give_back(self)

    def _run_serially(self, inputs: list[Any], *, may_measure: bool = True) -> list[Any]:
        if self.lowered.phase is Phase.FORWARD:
            self._family.replayed = False
        outputs = None
        if self._planner is not None and not self._settled and not self._tunes_later and may_measure:
            self._make_room(self._serial.plan)
            outputs = self._planner.measuring_run(inputs)
            if self._planner.error is not None:
                self._settled = True
                self._lesser = "runs on one stream, since its kernels could not be measured", self._planner.error
                self._repair(self._planner.error)
        if outputs is None:
            outputs = self._serial(inputs)
        if may_measure:
            self._thread.warm = True
        return outputs

    def _must_not_overwrite(self) -> bool:
        return self.lowered.phase is Phase.FORWARD and self._family.occupied

    @property
    def _is_warm(self) -> bool:
        return getattr(self._thread, "warm", False)

    def _may_capture(self, inputs: Sequence[Any]) -> bool:
        if self._refused or not self._is_warm or self._captures >= 2 * MAX_CAPTURES or self._must_not_overwrite():
            return False
        return self.lowered.phase is not Phase.BACKWARD or self._family.saved_by_graph(inputs)

    def _capture(self, inputs: Sequence[Any]) -> Captured | None:
        with guard(self._context.place):
            if self._planner is not None and not self._settled and not self._tunes_later:
                self._settle(self._planner, inputs)
            self._captures += 1
            with_graph_io = graph_io.can_be_made()
            try:
                self._captured = self._try(self.plan, inputs, self._pool, self._arena)
            except (RuntimeError, torch.AcceleratorError) as error:
                self._repair(error)
                if with_graph_io and not graph_io.can_be_made():  # the driver has refused a copy: then around the graph
                    return self._capture(inputs)
                if self.plan is not self._serial.plan:  # one stream may still do
                    self.plan = self._serial.plan
                    error = error.with_traceback(None)  # which would keep what was captured
                    self._lesser = "runs on one stream, since its plan could not be captured", error
                    return self._capture(inputs)
                self._refused = True
                self._tell(f"CUDA refused to capture {self.lowered.program.graph.name}: {error}")
            if self._captured is not None and self.lowered.phase is Phase.FORWARD:
                self._family.addresses, self._family.saved = self._captured.addresses, self._captured.saved
            if self._captured is not None and self._may_read_in_place:
                self._replayer = self._make_replayer(self._captured, inputs)
            if self._captured is not None and self._lesser is not None:
                lesser, self._lesser = self._lesser, None
                self._tell_lesser(*lesser)
            if self._captured is not None and self._captures == MAX_CAPTURES + 1:
                self.notes.append(f"parameters were elsewhere {MAX_CAPTURES} times, so every call copies them")
        return self._captured

    def _make_replayer(self, captured: Captured, inputs: Sequence[Any]) -> Replayer | None:
        num_bytes = bytes_in_place(self.lowered, captured.slot_positions, inputs)
        return Replayer(captured, num_bytes, self._context, self._stop_reading_in_place) if num_bytes else None

    def _stop_reading_in_place(self, error: Exception) -> None:
        self._may_read_in_place = False
        self._repair(error)
        self.notes.append(f"inputs are copied; reading them in place failed: {error}")

    def _tell(self, reason: str) -> None:
        self.notes.append(reason)
        self._warn(reason)

    def _tell_lesser(self, what: str, error: Exception) -> None:
        """Tell of an error that left it less quick; want of memory is no reason to warn."""
        tell = self.notes.append if isinstance(error, torch.OutOfMemoryError) else self._tell
        tell(f"{self.lowered.program.graph.name} {what}: {first_line(error)}")

    @property
    def _pool(self) -> GraphPool | None:
        """Graphs may share memory only if nothing in it outlives a call (docs/decisions/cuda-graphs.md)."""
        if self.gives_memory_back or len(self._copied) != len(self.lowered.program.outputs):
            return None
        return self._context.graphs.pool

    def _try(self, plan: Plan, inputs: Sequence[Any], pool: GraphPool | None, arena: Arena | None = None) -> Captured:
        self._make_room(plan)
        return Captured(
            self.lowered,
            plan,
            inputs,
            context=self._context,
            family=self._family,
            copied=self._copied,
            fixed_state=self._captures <= MAX_CAPTURES,
            pool=pool,
            arena=arena,
            user=self,
        )

    def _make_room(self, plan: Plan) -> None:
        """Empty PyTorch's cache where memory is short: while a graph is captured, it does not do so itself."""
        needed = ROOM * peak_bytes(plan)
        with self._context.capture_lock:
            if torch.cuda.mem_get_info(self._index)[0] < needed:
                torch.cuda.empty_cache()

    def _settle(self, planner: Planner, inputs: Sequence[Any]) -> None:
        """Choose the plan, by trials on the caller's inputs; afterwards all memory holds what it held before."""
        trials = Trials(
            lambda plan: self._try(plan, inputs, None), self._serial.plan, self._context, self.lowered.program
        )
        try:
            self.plan = planner.settle(trials).plan
        except Exception as error:
            self._settled = True  # in front of what telling may raise
            if not isinstance(error, PlanError):  # a bug, found before anything ran
                raise
            self._tell_lesser("runs on one stream", error)
        self._settled = True  # but not after Ctrl-C
        if trials.error is not None:
            self._repair(trials.error)
            # Candidates, where there are any, say which of them were too large.
            if not (self.candidates and isinstance(trials.error, torch.OutOfMemoryError)):
                self.notes.append(f"not every plan could be tried: {first_line(trials.error)}")
        if trials.ran:
            del trials
            torch.cuda.empty_cache()

    def _tune(self) -> None:
        """Take the next step towards a better plan, if it is time for one."""
        assert self._planner is not None, "what is not settled has one"
        if self._tuning is None:
            self._tuning = Background(self._find_plan(self._planner), time.monotonic)
        captured = self._captured
        if captured is None or not captured.is_latest or not self._tuning.is_due:
            self._settled = self._tuning.is_over
            return
        with guard(self._context.place):
            try:
                self._tuning.advance()
            except PlanError as error:  # a bug, found before anything ran
                self._settled = True
                self.notes.append(f"runs on one stream: {first_line(error)}")
        if self._tuning.is_over:
            self._settled = True
            found, self._tuning = self._tuning.result, None
            if found is not None and found.plan.num_streams > 1:
                self.plan = found.plan
                self._drop()  # the next call captures it

    def _find_plan(self, planner: Planner) -> Generator[None, None, CandidatePlan | None]:
        """Measure kernels, then choose as ``_settle`` does, each time on what the graph holds of the latest call."""
        program = self.lowered.program
        yield
        captured = self._latest()
        with unchanged(program, captured.written, torch.cuda.default_generators[self._index]):
            planner.measuring_run(captured.inputs)
        if planner.error is not None:
            self._repair(planner.error)
            self.notes.append(f"its kernels could not be measured: {first_line(planner.error)}")
            return None
        trials = Trials(
            lambda plan: self._try(plan, self._latest().inputs, None), self._serial.plan, self._context, program
        )
        steps = planner.settle_stepwise(trials)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                if trials.error is not None:
                    self._repair(trials.error)
                    self.notes.append(f"not every plan could be tried: {first_line(trials.error)}")
                return done.value  # type: ignore[no-any-return]
            finally:
                if trials.ran:
                    trials.forget()  # between calls memory is the user's
                    torch.cuda.empty_cache()
            yield

    def _repair(self, cause: Exception) -> None:
        """Let the device work again after a capture, or a trial, that failed.

        Raises:
            DeviceError: It does not, so that there is nothing to fall back to.
        """
        try:
            repair(self._context)
        except torch.AcceleratorError:
            raise DeviceError(
                f"{self._context.place} failed while {self.lowered.program.graph.name} was captured or tried: "
                f"{first_line(cause)}. Nothing runs there any more in this process. In a new one, streams=1 leaves out "
                'all trials, and engine="serial" captures nothing: which of them works tells what is at fault.'
            ) from cause

    def _replay(self, captured: Captured, inputs: list[Any]) -> list[Any]:
        stream = current_stream_handle(self._index)
        if stream != self._context.graphs.stream_handle:
            self._context.graphs.enter()
        if stream not in captured.streams:
            captured.serve(torch.cuda.current_stream(self._index))
        run = captured.run if self._replayer is None or not self._is_warm else self._replayer.run
        if torch.cuda.current_device() == self._index:  # 0.1 µs, a guard 10
            outputs = run(inputs)
        else:
            with guard(self._context.place):
                outputs = run(inputs)
        if self.lowered.phase is Phase.FORWARD:
            self._family.replayed = True
            self._family.waiting = captured.watch(outputs)
        return outputs


def first_line(error: Exception) -> str:
    """Return what an error says, without PyTorch's advice for debugging."""
    return str(error).partition("\n")[0]
