"""A recorded run as a trace that ui.perfetto.dev opens: steps, streams, idle time by cause, and the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from millstream.insight import Findings
from millstream.report.idle.source_lines import activity_text, code, place

MAX_EVENTS = 100_000  # on each track: the file stays below 20 MB

_STEPS, _IDLE, _HOST, _STREAMS = 1, 2, 3, 10  # threads of the trace


def to_trace(found: Findings) -> str:
    """Chrome's trace events; times in them are microseconds since the first step."""
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": list(_events(found))}) + "\n"


def _events(found: Findings) -> Iterator[dict[str, Any]]:
    recording = found.recording
    start = found.steps[0].start_ns if found.steps else recording.start_ns
    end = found.steps[-1].end_ns if found.steps else recording.end_ns
    names = {_STEPS: "steps", _IDLE: "idle, by cause", _HOST: "host, exact spans"}
    for stream in sorted({each.stream for each in recording.activities}):
        names[_STREAMS + stream] = "computing" if recording.is_synchronous else f"stream {stream}"
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": recording.script or "process"}}
    for thread, name in names.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}

    def event(thread: int, name: str, first: int, last: int, **arguments: Any) -> dict[str, Any]:
        times = {"ts": (first - start) / 1000, "dur": (last - first) / 1000}
        return {"ph": "X", "pid": 1, "tid": thread, "name": name, **times, "args": arguments}

    for number, step in enumerate(found.steps):
        yield event(_STEPS, f"step {number}", step.start_ns, step.end_ns)
    for each in found.slices[:MAX_EVENTS]:
        site = recording.user_site(each.stack)
        yield event(_IDLE, str(each.cause), each.start_ns, each.end_ns, line=place(site), code=code(site))
    within = [each for each in recording.spans if each.thread == recording.thread and start <= each.start_ns < end]
    for span in within[:MAX_EVENTS]:
        site = recording.user_site(span.stack)
        yield event(_HOST, str(span.cause), span.start_ns, span.end_ns, line=place(site), what=span.detail)
    launches = {launch.number: launch for launch in recording.launches}
    for each in [each for each in recording.activities if start <= each.start_ns < end][:MAX_EVENTS]:
        text = activity_text(each, launches, recording)
        yield event(_STREAMS + each.stream, each.name or str(each.kind), each.start_ns, each.end_ns, what=text)
