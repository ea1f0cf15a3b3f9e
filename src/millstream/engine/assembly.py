"""Lowered program → checked plan → engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from millstream import _native
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.device import Place, context
from millstream.engine.arena import Arena
from millstream.engine.cpu.placed_cpu import PlacedOnCpu
from millstream.engine.cpu.threads import ThreadsEngine
from millstream.engine.cpu.worker_pool import find_library
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.cuda.captured_flows import why_not_captured
from millstream.engine.cuda.cuda_graph import CudaGraphEngine
from millstream.engine.cuda.placed_gpus import PlacedOnGpus
from millstream.engine.cuda.plan_devices import room_on
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.host.streams_engine import StreamsEngine
from millstream.engine.placed.placed_engine import PlacedEngine
from millstream.errors import ArgumentError, DeviceError
from millstream.graph import Plan
from millstream.lower import Lowered
from millstream.lower.control_flow import Control
from millstream.schedule import HAND_STREAMS, MOST_STREAMS, Scheduling, peak_bytes, plan_alike, plan_graph, plan_serial
from millstream.settings import ENGINES, Settings


@dataclass(frozen=True)
class OneOfMany:
    """Facts about a program that exists for other sizes, too.

    Attributes:
        arena: Memory that the engines of all sizes have in turn.
        like: One of another size that has found its plan; ``None`` for the first.
        is_warm: Whether this thread has run the kernels on tensors of these sizes.
    """

    arena: Arena
    like: Engine | None = None
    is_warm: bool = False


def build(
    lowered: Lowered,
    settings: Settings,
    *,
    family: ProgramPair | None = None,
    one_of_many: OneOfMany | None = None,
    warn: Callable[[str], None] = lambda reason: None,
) -> Engine:
    """Plan a program, check the plan, and make the engine that runs it.

    Args:
        lowered: What to run.
        settings: Which engine (``MILLSTREAM_ENGINE`` overrides it), how many streams (``MILLSTREAM_NSTREAMS`` does),
            and whether callers own what they get.
        family: Shared by the programs of one model.
        one_of_many: Where the program is there for other sizes, too.
        warn: Told when the program does not run as asked for, which the engine's notes say, too.

    Raises:
        ArgumentError: The environment names no engine, or the memory budget is too small for one stream.
        PlanError: The plan would race; a bug, found before anything ran.
    """
    engine = engine_asked(settings.engine)
    scheduling = with_environment(settings.scheduling)
    if settings.devices and not lowered.program.does_nothing:
        own = replace(settings, devices=())
        pair, many = family or ProgramPair(), one_of_many
        if many is not None and isinstance(many.like, PlacedEngine):
            many = replace(many, like=many.like.one)  # its plan may be for a graph with copies
        alone = functools.partial(build, lowered, own, family=pair, one_of_many=many, warn=warn)
        return _build_placed(lowered, settings, engine, scheduling, alone, warn, pair)
    plan = plan_serial(lowered.program.graph)
    budget = scheduling.budget_bytes(plan)
    many = one_of_many or OneOfMany(Arena())
    arena = None if one_of_many is None else many.arena
    chosen: Plan | None = None
    if many.like is not None and scheduling.streams is None and engine is None:
        scheduling = replace(scheduling, streams=many.like.num_streams)
        chosen = _plan_like(many.like.plan, plan, budget)
    check_plan(chosen or plan)  # the other one has the steps of that of the first size
    on_cpu, obstacle = lowered.program.devices == {"cpu"}, ""
    if lowered.program.does_nothing:  # every engine does that alike
        return SerialEngine(lowered, plan)
    if engine == "threads" and not on_cpu:
        obstacle = "it has kernels elsewhere than on the CPU."
    elif engine == "threads" and find_library() is None:
        obstacle = _why_not_threads()
    elif engine == "threads" or (engine is None and on_cpu and not scheduling.serial and torch.get_num_threads() > 1):
        return ThreadsEngine(lowered, plan, scheduling, asked=engine is not None, arena=arena)
    elif engine != "serial":
        obstacle = why_not_graph(lowered)
        if not obstacle and engine == "streams":
            return streams_engine(lowered, scheduling)
        obstacle = obstacle or why_not_capture()
        if not obstacle:
            return CudaGraphEngine(
                lowered,
                plan,
                copy_outputs=settings.copy_outputs,
                family=family or ProgramPair(),
                scheduling=scheduling,
                chosen=chosen,
                arena=arena,
                is_warm=many.is_warm,
                warn=warn,
            )
    serial = SerialEngine(lowered, plan, arena)
    if obstacle and (engine is not None or not on_cpu):
        serial.notes.append(f"{lowered.program.graph.name} runs on the serial engine: {obstacle}")
        warn(serial.notes[-1])
    return serial


def _build_placed(
    lowered: Lowered,
    settings: Settings,
    engine: str | None,
    scheduling: Scheduling,
    build_alone: Callable[[], Engine],
    warn: Callable[[str], None],
    pair: ProgramPair,
) -> Engine:
    """Make the engine for several devices, beside that for one, which runs where several cannot."""
    graph, devices = lowered.program.graph, settings.devices
    on_cpu = devices[0].startswith("cpu")
    if obstacle := _why_not_placed(lowered, devices, engine):
        alone = build_alone()
        alone.notes.append(f"{graph.name} runs on one device: {obstacle}")
        warn(alone.notes[-1])
        return alone
    if not settings.has_several_devices:
        return build_alone()
    bound, needed = scheduling.memory if isinstance(scheduling.memory, int) else None, peak_bytes(plan_serial(graph))
    is_within = bound is None or needed <= bound
    fits = is_within and (on_cpu or needed <= room_on(devices[0]))
    bounds = None if bound is None else (bound,) * len(devices)
    how: dict[str, Any] = {"asked": engine, "memory_bytes": bounds}
    if on_cpu:
        return PlacedOnCpu(lowered, build_alone() if fits else None, devices, scheduling, **how)
    how |= {"copy_outputs": settings.copy_outputs, "pair": pair}
    if fits:
        return PlacedOnGpus(lowered, build_alone(), devices, scheduling, **how)
    how["memory_bytes"] = tuple(room_on(device) if bound is None else min(bound, room_on(device)) for device in devices)
    try:
        return PlacedOnGpus(lowered, None, devices, scheduling, **how)
    except (ArgumentError, DeviceError) as error:
        if not is_within:
            raise
        alone = build_alone()  # whose room was judged without knowing what can be freed
        alone.notes.append(f"{graph.name} runs on one device: {error}")
        return alone


def check_devices(devices: Sequence[str]) -> None:
    """See that the devices that a program is to be placed on are there.

    Raises:
        ArgumentError: One is not; the message lists those that are.
    """
    for name in devices:
        try:
            name.startswith("cpu") or Place.of(name)
        except DeviceError as error:
            raise ArgumentError(f"devices={list(devices)}: {error}") from error


def _why_not_placed(lowered: Lowered, devices: Sequence[str], engine: str | None) -> str:
    """Say in a few words why a program runs on one device; empty when it need not."""
    home = devices[0]
    own = "cpu" if home.startswith("cpu") else home
    if lowered.program.devices != {own}:
        begins = "names CPUs" if own == "cpu" else f"begins with {home}"
        return f"its kernels run on {', '.join(sorted(lowered.program.devices))}, and devices= {begins}."
    if len(devices) == 1:
        return ""
    if own == "cpu":
        if engine not in (None, "serial", "threads"):
            return f"the engine {engine} is for CUDA devices."
        return "" if engine == "serial" or find_library() is not None else _why_not_threads()
    if engine not in (None, "streams", "graph"):
        return f"the engine {engine} knows one CUDA device."
    kinds = {device: _kind_of(device) for device in devices}
    if len({*kinds.values()}) > 1:
        told = ", ".join(f"{device} is {kind}" for device, kind in kinds.items())
        return f"kernels are compiled and measured for one kind of device, and {told}."
    return why_not_graph(lowered) or why_not_capture()


def _kind_of(device: str) -> str:
    """What a CUDA device is, as far as the speed and the choice of kernels depends on it."""
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name} of {properties.multi_processor_count} multiprocessors and {memory}"


def _plan_like(known: Plan, serial: Plan, budget: int) -> Plan:
    """The plan of another size for the graph of ``serial``, which it falls back to where memory is short."""
    if known.num_streams == 1:
        return serial
    alike = plan_alike(serial.graph, known)
    return alike if peak_bytes(alike) <= budget else serial


def _why_not_threads() -> str:
    """Say in a few words why nothing can run on threads, which has turned out."""
    return f"{_native.why_not('threads') or 'tensors of this PyTorch are not known'}."


def why_not_capture() -> str:
    """Say in a few words why nothing can be captured on any CUDA device; empty when it can."""
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":  # PyTorch 2.11 ends the process when it frees some
        return "PyTorch's allocator is cudaMallocAsync, which cannot take back what a graph has allocated."
    return ""


def streams_engine(lowered: Lowered, scheduling: Scheduling) -> StreamsEngine:
    """Make the engine that issues every kernel in every call, on four streams unless the user says otherwise."""
    graph = lowered.program.graph
    budget = scheduling.budget_bytes(plan_serial(graph))
    policy = scheduling.policy or "list"
    plan = plan_graph(graph, Roofline().estimate(graph), scheduling.streams or 4, policy, memory_bytes=budget)
    check_plan(plan)
    return StreamsEngine(lowered, plan, context(next(iter(lowered.program.devices))))


def engine_asked(engine: str | None) -> str | None:
    """Let ``MILLSTREAM_ENGINE`` say which engine.

    Raises:
        ArgumentError: It has no such name.
    """
    told, choice = os.environ.get("MILLSTREAM_ENGINE"), ", ".join(map(repr, ENGINES))
    if told and told not in ENGINES:
        raise ArgumentError(f"MILLSTREAM_ENGINE={told!r} is no engine; choose one of {choice}, or unset it.")
    return told or engine


def with_environment(scheduling: Scheduling) -> Scheduling:
    """Let ``MILLSTREAM_NSTREAMS`` say how many streams.

    Raises:
        ArgumentError: It is neither a possible number nor ``auto``.
    """
    number = os.environ.get("MILLSTREAM_NSTREAMS")
    if not number:
        return scheduling
    if number == "manual":
        return replace(scheduling, streams=HAND_STREAMS, policy="manual")
    try:
        return replace(scheduling, streams=None if number == "auto" else int(number))
    except ValueError as error:
        possible = f"give 1 to {MOST_STREAMS}, 'auto' or 'manual'"
        raise ArgumentError(f"MILLSTREAM_NSTREAMS={number!r} is no number of streams; {possible}.") from error


def why_not_graph(lowered: Lowered) -> str:
    """Say in a few words why a program cannot become one CUDA graph; empty when it can."""
    graph = lowered.program.graph
    if lowered.program.devices == {"cpu"} or not graph.kernels:
        return "there are no kernels on a CUDA device."
    if len(lowered.program.devices) > 1:
        return f"its kernels run on {', '.join(sorted(lowered.program.devices))}."
    for buffer in graph.buffers:
        if buffer.device == "cpu":
            users = [k for k in graph.kernels if buffer.id in (*k.reads, *k.writes)]
            where = f" at {users[0].source}" if users and users[0].source else ""
            return f"buffer {buffer.id} is in host memory{where}; create it on the device."
    for kernel in graph.kernels:
        flow = lowered.program.calls[kernel.id].target
        if isinstance(flow, Control) and (reason := why_not_captured(flow)):
            where = f" at {kernel.source}" if kernel.source else ""
            return f"{kernel.name}{where} {reason}."
    return ""
