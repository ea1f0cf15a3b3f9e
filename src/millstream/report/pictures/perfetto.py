"""Pictures as a trace that ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", the JSON that Chrome writes; times in it are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millstream.report.pictures.picture import Bar, Picture


def to_perfetto(pictures: Sequence[Picture], more: Mapping[str, Any] | None = None) -> str:
    """Write each picture as a process, each stream as a thread of it, each wait as an arrow.

    Args:
        pictures: What to draw.
        more: Entries that viewers skip.
    """
    events = [event for number, picture in enumerate(pictures, 1) for event in _events(picture, number)]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events, **(more or {})}) + "\n"


def _events(picture: Picture, pid: int) -> Iterator[dict[str, Any]]:
    # The viewer takes thread 0 for the idle one, and a thread of two processes for one that moved: each has its own.
    thread_of = [1000 * pid + stream for stream in range(picture.num_streams)]
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": picture.title}}
    yield {"ph": "M", "pid": pid, "name": "process_labels", "args": {"labels": " ".join(picture.caption)}}
    for stream in range(picture.num_streams):
        thread = {"ph": "M", "pid": pid, "tid": thread_of[stream]}
        yield {**thread, "name": "thread_name", "args": {"name": picture.lane(stream)}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": stream}}
    for bar in picture.bars:
        place = {"pid": pid, "tid": thread_of[bar.stream]}
        times = {"ts": bar.start_ns / 1000, "dur": (bar.end_ns - bar.start_ns) / 1000}
        yield {"ph": "X", "name": bar.label, "cat": bar.kind, **place, **times, "args": _arguments(bar)}
    for number, arrow in enumerate(picture.arrows):
        if arrow.target is None:
            continue  # an arrow needs work at both its ends
        source, target = picture.bars[arrow.source], picture.bars[arrow.target]
        flow = {"name": "wait", "cat": "wait", "id": f"{pid}.{number}", "pid": pid}
        # It belongs to the work that runs at its time, and at its very end that is the next one.
        inside_ns = max(source.start_ns, source.end_ns - 1)
        yield {**flow, "ph": "s", "tid": thread_of[source.stream], "ts": inside_ns / 1000}
        yield {**flow, "ph": "f", "bp": "e", "tid": thread_of[target.stream], "ts": target.start_ns / 1000}


def _arguments(bar: Bar) -> dict[str, Any]:
    kernel = bar.kernel
    if kernel is None:
        return {}
    return {
        "kernel": kernel.id,
        "name": kernel.name,
        "made of": ", ".join(kernel.ops),
        "bytes": kernel.num_bytes,
        "flops": kernel.flops,
        "from": kernel.source,
        "critical path": bar.is_critical,
    }
