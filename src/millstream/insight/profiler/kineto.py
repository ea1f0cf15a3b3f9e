"""Reads what torch.profiler writes (Chrome's trace events): kernels, copies, launches, waits, driver's work.

Source: Kineto's ``output_json.cpp``, and the CUDA runtime's and driver's names of calls. Times there are microseconds
since ``baseTimeNanoseconds``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millstream.insight.causes import Cause
from millstream.insight.records import Activity, ActivityKind, HostSpan, LaunchCall, StreamWait

_ACTIVITIES = {
    "kernel": ActivityKind.KERNEL,
    "gpu_memcpy": ActivityKind.COPY,
    "gpu_memset": ActivityKind.MEMSET,
}
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCHING = ("LaunchKernel", "GraphLaunch")
_BLOCKING = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize")
_ALLOCATING = (
    "Malloc",
    "Free",
    "HostAlloc",
    "HostRegister",
    "MemCreate",
    "MemMap",
    "MemUnmap",
    "MemAddress",
    "MemRelease",
)
_LOADING = ("ModuleLoad", "LibraryLoad", "ModuleGetFunction")
_OVERHEADS = {"Lazy Function Loading": Cause.COMPILE, "Driver Compiler": Cause.COMPILE}
_COMMUNICATION = ("nccl", "msccl")


@dataclass(frozen=True)
class DeviceTrace:
    """The device's side of some steps, and the driver calls behind it."""

    activities: tuple[Activity, ...]
    launches: tuple[LaunchCall, ...]
    spans: tuple[HostSpan, ...]
    waits: tuple[StreamWait, ...]

    def shifted(self, by_ns: int) -> DeviceTrace:
        """The same on another clock."""

        def move(each: Any) -> Any:
            return replace(each, start_ns=each.start_ns + by_ns, end_ns=each.end_ns + by_ns)

        return DeviceTrace(
            tuple(map(move, self.activities)),
            tuple(map(move, self.launches)),
            tuple(map(move, self.spans)),
            tuple(replace(each, at_ns=each.at_ns + by_ns) for each in self.waits),
        )


def read_trace(trace: Mapping[str, Any]) -> DeviceTrace:
    """Read a trace of one process and device.

    Args:
        trace: As ``json.load`` gives what ``export_chrome_trace`` wrote.
    """
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    activities, calls, spans, waits = [], [], [], []
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X":
            continue
        category, arguments = event.get("cat", ""), event.get("args", {})
        start = base_ns + round(float(event["ts"]) * 1000)
        end = start + round(float(event.get("dur", 0)) * 1000)
        name = str(event.get("name", ""))
        if category in _ACTIVITIES:
            activities.append(_activity(start, end, name, category, arguments))
        elif category in _CALLS:
            calls.append(LaunchCall(int(arguments.get("correlation", 0)), int(event.get("tid", 0)), start, end, name))
        elif category == "overhead":
            cause = _OVERHEADS.get(name, Cause.PROFILER)
            spans.append(HostSpan(int(event.get("tid", 0)), start, end, cause, (), name))
        elif category == "cuda_sync" and "Stream Wait" in name and "wait_on_stream" in arguments:
            stream = int(arguments.get("stream", 0))
            waits.append(StreamWait(start, stream, int(arguments["wait_on_stream"])))
    launched = {each.launch for each in activities}
    pageable = {each.launch for each in activities if each.is_pageable}
    for call in calls:
        span = _span_of(call, pageable)
        if span is not None:
            spans.append(span)
    launches = [call for call in calls if call.number in launched or any(part in call.name for part in _LAUNCHING)]
    # CUPTI may lose the first kernels of a window (pytorch#192021): it begins with the first one that was kept.
    begin = min((call.start_ns for call in launches if call.number in launched), default=0)
    launches = [call for call in launches if call.start_ns >= begin]
    return DeviceTrace(
        tuple(sorted(activities, key=lambda each: each.start_ns)),
        tuple(sorted(launches, key=lambda each: each.start_ns)),
        tuple(spans),
        tuple(waits),
    )


def _activity(start: int, end: int, name: str, category: str, arguments: Mapping[str, Any]) -> Activity:
    kind = _ACTIVITIES[category]
    if kind is ActivityKind.KERNEL and name.lower().startswith(_COMMUNICATION):
        kind = ActivityKind.COMMUNICATION
    graph = int(arguments.get("graph id", 0) or 0) or None
    return Activity(
        start,
        end,
        int(arguments.get("stream", 0)),
        kind,
        name,
        int(arguments["correlation"]) if "correlation" in arguments else None,
        graph,
        "Pageable" in name,
        int(arguments.get("bytes", 0)),
    )


def _span_of(call: LaunchCall, pageable: set[int | None]) -> HostSpan | None:
    """Return what a driver call is to a device that idles meanwhile; ``None`` where it only launches."""
    name = call.name
    if any(part in name for part in _BLOCKING):
        return HostSpan(call.thread, call.start_ns, call.end_ns, Cause.SYNC, (), name)
    if any(part in name for part in _LOADING):
        return HostSpan(call.thread, call.start_ns, call.end_ns, Cause.COMPILE, (), name)
    if any(part in name for part in _ALLOCATING) and "Async" not in name:
        return HostSpan(call.thread, call.start_ns, call.end_ns, Cause.ALLOCATOR, (), name)
    if "Memcpy" in name and ("Async" not in name or call.number in pageable):
        return HostSpan(call.thread, call.start_ns, call.end_ns, Cause.SYNC, (), name)
    return None
