"""Several GPUs of one process in one program.

The engine for one device captures and tunes as if it were alone. Then its kernels, whose costs are known by now, are
placed. What is found runs on streams of all devices, which shows whether it gives the bits of one device; it is
captured as one CUDA graph over them, or where the driver refuses that, goes on issuing its kernels in every call; and
it is kept where it is faster.

What one device has no room for is placed before it runs, by calculated costs, and compared with nothing.

State is on the user's device, and what others need of it crosses in every call. So does what a forward program saves
for its backward program, each of which is placed for itself. It stays in the forward graph's memory, as it does on one
device (``cuda_graph.py``): calls for which there is none run on one device, or without a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import combinations
from math import inf
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.modes.switches import present
from millstream._torch.tensors import real_tensors
from millstream.cost import Costs, Roofline
from millstream.device import DeviceContext, context, guard
from millstream.device.cuda_graphs.capturing import repair
from millstream.device.peer_copies import copy_across
from millstream.engine.cuda.captured import Captured, ProgramPair
from millstream.engine.cuda.cuda_graph import MAX_CAPTURES, first_line
from millstream.engine.cuda.links import gpu_link
from millstream.engine.cuda.placed_trial import PlacedTrial
from millstream.engine.cuda.plan_devices import PlanDevices, devices_of_streams
from millstream.engine.engine import Engine
from millstream.engine.placed.placed_engine import PlacedEngine
from millstream.engine.placed.placed_program import Devices, find_constraints, place_program
from millstream.engine.plan_source import CompiledPlan, compile_plan
from millstream.engine.planning.planner import Planner
from millstream.engine.planning.store import Store, choice_key
from millstream.engine.unchanged import unchanged, written
from millstream.errors import ArgumentError, DeviceError, PlanError
from millstream.graph import CHOSEN, Candidate, Spread
from millstream.lower import Lowered, Phase
from millstream.lower.inductor.tuning import tuner_elsewhere
from millstream.placement import Machine, PlacedPlan, check_streams, place
from millstream.program import KernelCall, TensorLayout
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule.choose import ON_GPU, assess


class Gpus(Devices):
    """Calls and memory of a program on several GPUs."""

    copy = staticmethod(copy_across)
    stream_keyword = "stream"

    def __init__(self) -> None:
        self._tuners: dict[tuple[int, str], Any] = {}

    def move_call(self, call: KernelCall, device: str) -> KernelCall:
        """Load what Triton has compiled; libraries find their device by what they are given."""
        target, to = call.target, torch.device(device)
        tuner = getattr(target, "__self__", None)
        if call.stream_keyword:
            key = id(tuner), device
            if key not in self._tuners:
                self._tuners[key] = tuner_elsewhere(tuner, to.index)
            target = self._tuners[key].run
        args, kwargs = tree_map_only(torch.device, lambda _: to, (call.args, call.kwargs))
        return replace(call, target=target, args=args, kwargs=kwargs)

    def move_layout(self, layout: TensorLayout, device: str) -> TensorLayout:
        return replace(layout, device=torch.device(device))

    def move_constant(self, constant: torch.Tensor, device: str) -> torch.Tensor:
        moved = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device=device)
        return moved.copy_(constant)


class PlacedOnGpus(PlacedEngine):
    """Runs a program on GPUs of one kind.

    Args:
        lowered: What to run, on the first of them.
        one: Runs it there alone; ``None`` where it has no room for that.
        devices: Names; the first is the user's.
        scheduling: Streams are those of each device.
        asked: The engine that the user wants, ``graph`` or ``streams``, however long it takes; ``None`` leaves it open.
        memory_bytes: That temporaries and outputs may take, for each device; ``None`` sets no bounds.
        copy_outputs: Whether callers get their own copies of the outputs.
        pair: Shared by the forward and backward program of one model, and with ``one``.

    Raises:
        ArgumentError: They do not fit.
    """

    several = "graph"

    def __init__(
        self,
        lowered: Lowered,
        one: Engine | None,
        devices: Sequence[str],
        scheduling: Scheduling,
        *,
        asked: str | None,
        memory_bytes: tuple[int, ...] | None,
        copy_outputs: bool,
        pair: ProgramPair,
    ) -> None:
        super().__init__(lowered, one, asked=asked)
        self._home, self._pair, self._switches = context(devices[0]), pair, present()
        self._devices, self._scheduling, self._memory_bytes = tuple(devices), scheduling, memory_bytes
        self._copied = lowered.visible if copy_outputs else frozenset[int]()
        self._has_run = False
        self._first = None if one else self._place_at_once()

    @property
    def is_captured(self) -> bool:
        if self.one is None or self._chosen is not None:
            return self.name == "graph"
        return self.one.is_captured

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._is_rare(inputs):
            return self.run_uncaptured(inputs) if self.one is None else self.one(inputs)
        if self.one is None:
            outputs = super().__call__(inputs)
            self.name = self._several.name  # which is captured in its second call
            return outputs
        if not self._settled and (not self._has_run or self._home.is_capturing()):
            outputs = self.one(inputs)  # which chooses kernels; and nothing is tried in a graph of the caller's
            self._has_run = True
            return outputs
        return super().__call__(inputs)

    def run_uncaptured(self, inputs: list[Any]) -> list[Any]:
        if self.one is not None:
            return self.one.run_uncaptured(inputs)
        self._settle(inputs)
        return self._several.run_uncaptured(inputs)

    def _is_rare(self, inputs: Sequence[Any]) -> bool:
        """Whether a graph cannot serve a call, as its memory is that of another one, or switches have been changed."""
        if self.lowered.phase is Phase.FORWARD:
            return self._pair.occupied
        return self.lowered.phase is Phase.BACKWARD and not (
            self._pair.saved_by_graph(inputs) and present() is self._switches
        )

    @property
    def _several(self) -> PlacedOnStreams:
        assert isinstance(self._chosen, PlacedOnStreams), "it has settled"
        return self._chosen

    def _find_plan(self, inputs: Sequence[Any]) -> None:
        if self.one is None:
            assert self._first is not None, "it was placed at the start"
            only = PlacedOnStreams(self.lowered, self._first, None, self._home, self._copied, self._pair)
            only.may_capture, only.notes = self._asked != "streams", self.notes
            self._candidates = (replace(only.candidate, outcome=CHOSEN),)
            self._choose(only, self._first.costs)
            return
        self.plan, self.name = self.one.plan, self.one.name  # as it has settled
        of_one = self._pair.addresses, self._pair.saved
        with self._home.graphs.lock, guard(self._home.place):
            try:
                self._find_fastest(self.one, inputs)
            except (ArgumentError, DeviceError, PlanError, RuntimeError, torch.AcceleratorError) as error:
                name = self.lowered.program.graph.name
                _repair(self._home, self._devices, name, error)
                self.notes.append(f"{name} runs on one device: {first_line(error)}")
        if self._chosen is None:
            self._pair.addresses, self._pair.saved = of_one

    def _place_at_once(self) -> PlacedPlan:
        """Place by calculated costs; of several plans the one that is predicted to be fastest."""
        graph = self.lowered.program.graph
        with real_tensors():  # links may be measured while PyTorch compiles
            found = [*self._place(Roofline().estimate(graph), self._scheduling.streams or 1)]
        if not found:
            raise ArgumentError(f"{graph.name} does not fit on {self._devices[0]}, and nothing of it can be elsewhere.")
        return min(found, key=lambda placed: placed.predicted_ns)

    def _find_fastest(self, one: Engine, inputs: Sequence[Any]) -> None:
        """Try placements, and keep the fastest, if it is faster than one device or another engine was asked for."""
        program, costs = self.lowered.program, self._find_costs(one, inputs)
        if self._asked is None and ON_GPU.leaves_nothing_to_gain(program.graph, costs, costs.total_ns):
            return
        store = Store(self._home.torch_device)
        key = f"{choice_key(program, self._scheduling)} on {', '.join(self._devices)}"
        noted = _read_choice(store.load_choice(key)) if self._asked is None else ()
        if noted and noted[0].is_chosen:  # one device
            self._candidates = noted
            return
        runners = [
            PlacedOnStreams(self.lowered, each, one, self._home, self._copied, self._pair)
            for each in self._place(costs, 1, one.num_streams)
        ]
        told = [assess(one.plan, costs).describe(), *(each.candidate for each in runners)]
        trial = PlacedTrial(self.lowered, one, inputs, self._home)
        known = next((number for number, each in enumerate(told) if _is_chosen_in(each, noted)), 0)
        if known and not self._make_ready(runners[known - 1], trial, inputs):
            told, chosen = [*noted], known
        else:
            told, chosen = self._time_all(runners, told, trial, inputs)
            if self._asked is None and runners:
                store.save_choice(key, {"candidates": [asdict(each) for each in told]})
        if trial.varies:
            name = program.graph.name
            self.notes.append(f"{name} gives other bits each time on one device: numbers were compared, and not bits")
        for number, runner in enumerate(runners, 1):
            if number != chosen:
                runner.release()
        self._candidates = tuple(told) if runners else ()
        if chosen:
            self._choose(runners[chosen - 1], runners[chosen - 1].placed.costs)
            self.name = runners[chosen - 1].name
            self.notes += runners[chosen - 1].notes
            one.release()

    def _time_all(
        self, runners: Sequence[PlacedOnStreams], told: list[Candidate], trial: PlacedTrial, inputs: Sequence[Any]
    ) -> tuple[list[Candidate], int]:
        """Time all plans that compute what one device does; return what came of them, and which is to run."""
        best, chosen = 1 - ON_GPU.margin if self._asked is None else inf, 0
        told = [replace(each, outcome="slower") for each in told]
        for number, runner in enumerate(runners, 1):
            if wrong := self._make_ready(runner, trial, inputs):
                told[number] = replace(told[number], outcome=wrong)
                runner.release()
                continue
            own_ns, one_ns = trial.time(runner)
            told[0], told[number] = replace(told[0], measured_ns=one_ns), replace(told[number], measured_ns=own_ns)
            share = own_ns / one_ns
            if share < best:
                best, chosen = share, number
        told[chosen] = replace(told[chosen], outcome=CHOSEN)
        return told, chosen

    def _make_ready(self, runner: PlacedOnStreams, trial: PlacedTrial, inputs: Sequence[Any]) -> str:
        """Capture a plan, where that can be; say what is wrong with what it computes, empty where nothing is."""
        wrong = trial.check(runner)
        if not wrong and self._asked != "streams":
            runner.capture(inputs)
            wrong = trial.check(runner)
        return wrong

    def _place(self, costs: Costs, *counts: int) -> Iterator[PlacedPlan]:
        """Yield placements on several devices, with so many streams on each, unless the user has said how many."""
        program, known = self.lowered.program, set[Any]()
        links = [gpu_link(*pair) for pair in combinations(self._devices, 2)]
        link = max(links, key=lambda link: link.copy_ns(1 << 20))
        for num_streams in dict.fromkeys(counts if self._scheduling.streams is None else (self._scheduling.streams,)):
            machine = Machine(self._devices, link, num_streams, self._memory_bytes)
            placed = place(program.graph, costs, machine, find_constraints(program))
            begins_at_home = devices_of_streams(placed.plan).get(0) == self._devices[0]  # as the caller's stream does
            if len(placed.devices) > 1 and begins_at_home and placed.plan.steps not in known:
                known.add(placed.plan.steps)
                yield placed

    def _find_costs(self, one: Engine, inputs: Sequence[Any]) -> Costs:
        """Return what the kernels were measured to take on one device."""
        if one.costs is not None:
            return one.costs
        program = self.lowered.program
        planner = Planner(self.lowered, plan_serial(program.graph), self._home, Scheduling())
        generator = torch.cuda.default_generators[self._home.place.index]
        with unchanged(program, written(program, inputs), generator):
            planner.measuring_run(list(inputs))
        if planner.error is not None:
            raise planner.error
        return planner.known_costs()


def _repair(home: DeviceContext, devices: Sequence[str], name: str, cause: Exception) -> None:
    """Let devices work again after a capture, or a trial, that failed.

    Raises:
        DeviceError: One does not.
    """
    try:
        for device in devices:
            repair(context(device))
    except torch.AcceleratorError:
        raise DeviceError(
            f"{home.place} failed while {name} was captured or tried on {', '.join(devices)}: {first_line(cause)}. "
            "Nothing runs there any more in this process; in a new one, leave out devices=."
        ) from cause


def _read_choice(noted: Mapping[str, Any] | None) -> tuple[Candidate, ...]:
    """What a choice was made from; empty where nothing was noted that says so."""
    try:
        read = [Candidate(**entry) for entry in (noted or {})["candidates"]]
        candidates = tuple(replace(each, spread=Spread(each.spread)) for each in read)
        hash(candidates)
        return candidates if sum(each.is_chosen for each in candidates) == 1 else ()
    except (KeyError, TypeError, ValueError):
        return ()


def _is_chosen_in(candidate: Candidate, noted: Sequence[Candidate]) -> bool:
    """Whether a plan comes out as the one that was chosen before."""
    return any(each.is_chosen and replace(each, measured_ns=None, outcome="") == candidate for each in noted)


class PlacedOnStreams:
    """Runs a placed plan on streams of all devices, by one graph once it is captured.

    Attributes:
        placed: What it runs.
        plan: The same without its costs.
        candidate: The same for a report.
        name: Of the engine that it is.
        may_capture: Whether calls may capture it.
        notes: Why it is no graph, where it was to be one.
    """

    def __init__(
        self,
        lowered: Lowered,
        placed: PlacedPlan,
        one: Engine | None,
        home: DeviceContext,
        copied: frozenset[int],
        pair: ProgramPair,
    ) -> None:
        check_streams(placed.plan)
        program = place_program(lowered.program, placed.placement, Gpus())
        self.placed, self.plan = placed, placed.plan
        self.candidate: Candidate = assess(placed.plan, placed.costs).describe()
        self.name = "streams"
        self.notes: list[str] = []
        self._lowered, self._one, self._home, self._copied = replace(lowered, program=program), one, home, copied
        self._used, self._pair = PlanDevices(program, placed.plan, home), pair
        self._run: CompiledPlan | None = None
        self._captured: Captured | None = None
        self._captures, self.may_capture = 0, False
        self._thread = (
            threading.local()
        )  # has ``warm`` once it has run the program: libraries' handles are each its own

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with self._home.graphs.lock:
            if self._home.is_capturing():  # the caller captures a graph, of which other devices are no part
                if self._one is None:
                    graph, place = self.plan.graph, self._home.place
                    raise DeviceError(
                        f"{graph.name} runs on {', '.join(graph.devices)}, as {place} has no room for it: it "
                        "cannot be a part of a graph that is captured there. Call it outside of the capture."
                    )
                return self._one(inputs)
            index = self._home.place.index
            self._home.graphs.enter()  # the arenas serve one call at a time
            captured = self._captured
            if self.may_capture and (captured is None or not captured.fits(inputs)):
                captured = self.capture(inputs) if getattr(self._thread, "warm", False) else None
            if captured is None:
                with self._used.entered():
                    return self._issue(inputs)
            self._used.serve()
            if current_stream_handle(index) not in captured.streams:
                captured.serve(torch.cuda.current_stream(index))
            with nullcontext() if torch.cuda.current_device() == index else guard(self._home.place):
                outputs = captured.run(inputs)
            if self._lowered.phase is Phase.FORWARD:
                self._pair.addresses, self._pair.saved = captured.addresses, captured.saved
                self._pair.replayed, self._pair.waiting = True, captured.watch(outputs)
            return outputs

    def run_uncaptured(self, inputs: list[Any]) -> list[Any]:
        """Run a call without its graph."""
        with self._home.graphs.lock:
            self._home.graphs.enter()
            with self._used.entered():
                return self._issue(inputs)

    def _issue(self, inputs: list[Any]) -> list[Any]:
        """Issue all kernels."""
        if not getattr(self._thread, "warm", False):
            self._used.take_workspaces()  # before PyTorch takes them elsewhere
        if self._run is None:
            context, elsewhere = self._home, self._used.elsewhere
            self._run = compile_plan(
                self._lowered.program, self.plan, self._used.bind(), context=context, elsewhere=elsewhere
            )
        self._used.serve()
        outputs = self._run(inputs)
        self._used.hand_over(outputs)
        self._thread.warm = True
        if self._lowered.phase is Phase.FORWARD:
            self._pair.replayed = False
        return outputs

    def capture(self, inputs: Sequence[Any]) -> Captured | None:
        """Make it one graph, for inputs that lie where these do; where that cannot be, issue kernels from now on.

        Raises:
            DeviceError: Its devices do not work any more.
        """
        self._captured = None
        self._captures += 1
        try:
            with self._used.entered():
                self._captured = Captured(
                    self._lowered,
                    self.plan,
                    inputs,
                    context=self._home,
                    family=self._pair,
                    copied=self._copied,
                    fixed_state=self._captures <= MAX_CAPTURES,
                    pool=None,
                    devices=self._used,
                )
        except (DeviceError, RuntimeError, torch.AcceleratorError) as error:
            self.name, self.may_capture = "streams", False
            name = self._lowered.program.graph.name
            _repair(self._home, self.plan.graph.devices, name, error)
            self.notes.append(
                f"{name} issues its kernels in every call: no graph of several devices, {first_line(error)}"
            )
            return None
        self.name, self.may_capture = "graph", True
        return self._captured

    def release(self) -> None:
        """Give the memory back; the next call takes it again."""
        with self._home.graphs.lock:
            if self._run is not None:
                for lender, event in self._run.events:
                    lender.events.release(event)
            self._run = self._captured = None
            self._captures = 0
            self._used.release()
