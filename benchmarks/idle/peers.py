"""What other tools' rules say of the records that suite ``idle`` has kept (``--keep``), beside our outcomes.

*HolisticTraceAnalysis* (``pip install HolisticTraceAnalysis``) reads the records as the trace that torch.profiler would
have written: it splits each stream's idle time into waiting for the host, for the next kernel, and other. *Nsight
Systems* has rules (User Guide, "Expert Systems Analysis"), which are applied here to the same records, as it documents
them; Nsight Systems itself is not run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.idle.suite import CASES, share
from millstream.insight import ActivityKind, Cause, Findings, Recording, analyse
from millstream.insight.gaps import find_gaps

GAP_NS, LEAST_USE, NUM_CHUNKS = 500_000_000, 0.5, 30
"""Nsight Systems: gaps from 500 ms, use below 50 % in one of 30 parts of the time."""
_CATEGORIES = {ActivityKind.COPY: "gpu_memcpy", ActivityKind.MEMSET: "gpu_memset"}


def to_kineto(recording: Recording) -> dict[str, Any]:
    """The records as Kineto's trace of one rank, with an operator around all calls, which HTA asks for."""
    start = min(launch.start_ns for launch in recording.launches)

    def event(category: str, name: str, each: Any, **arguments: Any) -> dict[str, Any]:
        times = {"ts": (each.start_ns - start) / 1e3, "dur": (each.end_ns - each.start_ns) / 1e3}
        stream = arguments.get("stream", 1)
        return {"ph": "X", "cat": category, "name": name, "pid": "stream" not in arguments, "tid": stream} | times | {
            "args": arguments
        }  # fmt: skip

    whole = replace(recording.steps[0], start_ns=start, end_ns=recording.steps[-1].end_ns)
    events = [event("cpu_op", "aten::steps", whole)]
    events += [event("cuda_runtime", each.name, each, correlation=each.number) for each in recording.launches]
    waits = [s for s in recording.spans if s.detail.startswith("cuda") and s.start_ns >= start]
    events += [event("cuda_runtime", span.detail, span, correlation=-n) for n, span in enumerate(waits, 1)]
    for each in recording.activities:
        if each.start_ns >= start:
            where = {"device": 0, "stream": each.stream, "correlation": each.launch, "bytes": each.num_bytes}
            events.append(event(_CATEGORIES.get(each.kind, "kernel"), each.name, each, **where))
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}


def ask_hta(recording: Recording) -> str:
    """Its categories of idle time, of the stream with most of it."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]  # pyrefly: ignore[missing-import]

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "rank0.json.gz")
        with gzip.open(path, "wt") as file:
            json.dump(to_kineto(recording), file)
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=folder)
        table, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    most = table.loc[table["idle_time"].idxmax(), "stream"]
    parts = table[table["stream"] == most].itertuples()
    return ", ".join(f"{each.idle_category} {share(each.idle_time_ratio)}" for each in parts if each.idle_time_ratio)


def nsys_rules(found: Findings) -> Iterator[str]:
    """Names of the rules that have something to show."""
    recording, start, end = found.recording, found.steps[0].start_ns, found.steps[-1].end_ns
    within = [each for each in recording.activities if start <= each.start_ns < end]
    gaps = [gap.end_ns - gap.start_ns for gap in find_gaps(within, start, end)]
    if max(gaps, default=0) >= GAP_NS:
        yield "gpu gaps"
    chunk = (end - start) / NUM_CHUNKS
    use = [0.0] * NUM_CHUNKS
    for each in within:
        use[min(int((each.start_ns - start) / chunk), NUM_CHUNKS - 1)] += (each.end_ns - each.start_ns) / chunk
    if low := sum(each < LEAST_USE for each in use):
        yield f"low use in {low} of {NUM_CHUNKS} parts"
    calls = [span.detail for span in recording.spans if span.cause is Cause.SYNC and start <= span.start_ns < end]
    steps = len(found.steps)
    if waits := sum("Synchronize" in name for name in calls):
        yield f"synchronisation, {waits / steps:.3g} calls a step"
    copies = [each for each in within if each.kind is ActivityKind.COPY]
    if pageable := sum(each.is_pageable for each in copies):
        yield f"pageable copies, {pageable / steps:.3g} a step"


def to_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """A table of all."""
    head = ("script", "planted", "millstream profile", "its line", "HolisticTraceAnalysis", "rules of Nsight Systems")
    lines = ["# The same records, by others' rules", "", *(__doc__ or "").splitlines()[2:], ""]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Read what was kept, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle.peers", description=__doc__)
    parser.add_argument("kept", type=Path, help="the folder that was given as --keep")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    rows = []
    for case in CASES:
        path = options.kept / f"{case.name}.profiled.pickle.gz"
        if not path.exists():
            continue
        with gzip.open(path) as file:
            recording = pickle.load(file)  # noqa: S301 - the suite's own
        found = analyse(recording)
        site = found.leading.site if found.leading is not None else None
        line = f"{Path(site.file).name}:{site.line}" if site is not None else ""
        outcome = f"{found.severity} {found.leading.cause if found.leading is not None else ''}".strip()
        planted = ", ".join(case.causes) or "nothing"
        rows.append((case.name, planted, outcome, line, ask_hta(recording), "; ".join(nsys_rules(found)) or "none"))
        print(rows[-1], flush=True)
    (options.out / "idle_peers.md").write_text(to_markdown(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
