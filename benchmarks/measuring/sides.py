"""Sides: what is compared, and the comparison itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.equality import Comparison
from benchmarks.measuring.harness import Run, Sample, alternate, device_clock, loop_clock, synchronize
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.suite import Settings, brief
from millstream.cost import H200
from millstream.schedule import critical_path_ns

WARM_CALLS = 3


@dataclass(frozen=True)
class Side:
    """One way to run a case, built, warm and judged.

    Attributes:
        name: ``ours`` or the baseline's.
        comparison: Whether it computes what eager computes.
        call: Runs it as a user does, on inputs that are there already.
        replay: Runs only what was captured; ``None`` for a side that captured nothing.
        build_s: Seconds from the uncompiled model to the first result.
        peak_bytes: Memory of the captured graph.
        executable: What ours reports about itself.
    """

    name: str
    comparison: Comparison
    call: Run
    replay: Run | None = None
    build_s: float | None = None
    peak_bytes: int | None = None
    executable: Any = None


@dataclass(frozen=True)
class Failure:
    """A baseline that could not be built."""

    name: str
    reason: str


def build_each(names: Iterable[str], build: Callable[[str], Side]) -> list[Side | Failure]:
    """Build baselines; one that fails does not stop the others."""
    sides: list[Side | Failure] = []
    for name in names:
        try:
            sides.append(build(name))
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result
            sides.append(Failure(name, brief(error)))
    return sides


def timed(build: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of the first call and the seconds until it is there."""
    synchronize(device)
    start = time.perf_counter()
    result = build()
    synchronize(device)
    return result, time.perf_counter() - start


def capture(run: Callable[[], Tensor], device: torch.device) -> tuple[Run, Tensor]:
    """Capture a call in one CUDA graph by hand, as PyTorch's documentation teaches.

    Returns:
        The replay and the result that it writes. The replay keeps what the call holds, such as parameters, which a
        graph reads and writes but does not own. Without a GPU it runs the call again, to try the scripts.
    """
    if device.type != "cuda":
        result = run()
        return lambda: result.copy_(run().detach()), result.detach()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return partial(_replay, graph, run), result


def _replay(graph: torch.cuda.CUDAGraph, _run: Callable[[], Tensor]) -> None:
    graph.replay()


def compare(case: str, ours: Side, peers: Iterable[Side | Failure], settings: Settings) -> list[Row]:
    """Time ours and its peers in turn, captured sides by replays, the others by calls, and return a row for each peer.

    A side whose comparison is not ``equal`` is not timed.
    """
    executable = ours.executable
    facts = Row(
        case,
        kernels=executable.num_kernels,
        streams=executable.num_streams,
        waits=executable.num_waits,
        peak_bytes=ours.peak_bytes,
        compile_s=ours.build_s,
        bound_ms=bound_ms(executable),
        predicted_ms=predicted_ms(executable),
        equal=ours.comparison.equal,
    )
    if not ours.comparison.equal:
        return [replace(facts, note=f"not timed: {ours.comparison.reason}")]
    rows: list[Row] = []
    for variant in ("replay", "call"):
        asked = [peer for peer in peers if variant == ("replay" if isinstance(peer, Side) and peer.replay else "call")]
        sound = [peer for peer in asked if isinstance(peer, Side) and peer.comparison.equal]
        samples = measure(ours, sound, variant, settings) if sound else {}
        timing = replace(facts, variant=settings.name(variant))
        if samples:
            own = samples["ours"]
            timing = replace(timing, ours_ms=own.median, p20=own.p20, p80=own.p80)
        for peer in asked:
            row = replace(timing, baseline=peer.name)
            if isinstance(peer, Failure):
                rows.append(replace(row, note=f"{peer.name} not run: {peer.reason}"))
            elif not peer.comparison.equal:
                rows.append(replace(row, note=f"{peer.name} not timed: {peer.comparison.reason}"))
            else:
                theirs = samples[peer.name].median
                rows.append(
                    replace(
                        row,
                        baseline_ms=theirs,
                        ratio=ratio(theirs, row.ours_ms),
                        peak_ratio=ratio(ours.peak_bytes, peer.peak_bytes),
                    )
                )
    return rows


def bound_ms(executable: Any) -> float | None:
    """The least time that any number of streams could reach: the longest chain of kernels, or the roofline of all."""
    graph, costs = executable.plan.graph, executable.costs
    if costs is None:
        return None
    floor_ns = [
        max(kernel.num_bytes * 1e9 / H200.bytes_per_s, kernel.flops * 1e9 / H200.matrix_flops_per_s)
        for kernel in graph.kernels
    ]
    return max(critical_path_ns(graph, costs), sum(floor_ns)) / 1e6


def predicted_ms(executable: Any) -> float | None:
    """What the simulator says of the plan that was chosen."""
    chosen = [candidate for candidate in executable.candidates if candidate.is_chosen]
    return chosen[0].predicted_ns / 1e6 if chosen else None


def measure(ours: Side, peers: list[Side], variant: str, settings: Settings) -> dict[str, Sample]:
    """Time ours and peers in turn, by replays or by calls."""
    clocks = {}
    for side in (ours, *peers):
        if variant == "call":
            clocks[side.name] = loop_clock(side.call, settings.device)
        else:
            assert side.replay is not None
            clocks[side.name] = device_clock(side.replay, settings.device)
    return alternate(clocks, settings.rounds)
