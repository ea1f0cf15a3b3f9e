"""Reading torch.profiler's traces: synthetic ones in its form."""

import pytest
import torch

from millstream.insight import ActivityKind, Cause, ProfiledStep, Recording, Severity, analyse
from millstream.insight.profiler.kineto import read_trace
from millstream.trace.device_profile import Recorded

BASE = 1_000_000_000


def event(cat, name, ts, dur, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def trace_of(*events):
    return {"baseTimeNanoseconds": BASE, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_kinds_times_and_links_are_read():
    trace = read_trace(
        trace_of(
            event("cuda_runtime", "cudaLaunchKernel", 10.5, 4.0, correlation=1),
            event("kernel", "gemm", 20.25, 8.0, stream=7, correlation=1),
            event("cuda_runtime", "cudaGraphLaunch", 30, 5, correlation=2),
            event("kernel", "a", 40, 1, stream=7, correlation=2, **{"graph id": 5}),
            event("kernel", "ncclDevKernel_AllReduce", 41, 3, stream=9, correlation=2, **{"graph id": 5}),
            event("cuda_runtime", "cudaMemcpyAsync", 50, 9, correlation=3),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 51, 7, stream=7, correlation=3, bytes=64),
            event("cuda_sync", "Stream Wait Event", 60, 0, stream=9, wait_on_stream=7),
            event("overhead", "Buffer Flush", 70, 2),
            event("cpu_op", "aten::mm", 9, 30),
        )
    )
    gemm, a, reduce, copy = trace.activities
    assert (gemm.start_ns, gemm.end_ns, gemm.stream, gemm.launch) == (BASE + 20_250, BASE + 28_250, 7, 1)
    assert (a.graph, a.launch) == (5, 2)
    assert reduce.kind is ActivityKind.COMMUNICATION
    assert (copy.kind, copy.is_pageable, copy.num_bytes) == (ActivityKind.COPY, True, 64)
    assert [launch.number for launch in trace.launches] == [1, 2, 3]
    assert [(wait.stream, wait.on_stream) for wait in trace.waits] == [(9, 7)]
    assert [(span.cause, span.detail) for span in trace.spans] == [
        (Cause.PROFILER, "Buffer Flush"),
        (Cause.SYNC, "cudaMemcpyAsync"),  # of pageable memory: the host waits
    ]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("cudaStreamSynchronize", Cause.SYNC),
        ("cudaDeviceSynchronize", Cause.SYNC),
        ("cudaMemcpy", Cause.SYNC),
        ("cudaMalloc", Cause.ALLOCATOR),
        ("cudaFree", Cause.ALLOCATOR),
        ("cuMemMap", Cause.ALLOCATOR),
        ("cuModuleLoadData", Cause.COMPILE),
    ],
)
def test_driver_call_has_its_cause(name, cause):
    (span,) = read_trace(trace_of(event("cuda_runtime", name, 5, 3, correlation=9))).spans
    assert (span.cause, span.start_ns, span.end_ns) == (cause, BASE + 5_000, BASE + 8_000)


@pytest.mark.parametrize("name", ["cudaMallocAsync", "cudaEventRecord", "cudaLaunchKernel", "cudaMemsetAsync"])
def test_call_that_does_not_wait_is_no_span(name):
    assert read_trace(trace_of(event("cuda_runtime", name, 5, 3, correlation=9))).spans == ()


def test_steps_within_the_window_get_a_diagnosis():
    events, steps = [], []
    for number in range(20):
        at = 1000.0 * number
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 10, 5, correlation=number))
        events.append(event("kernel", "k", at + 20, 300, stream=7, correlation=number))
        events.append(event("cuda_runtime", "cudaMalloc", at + 400, 500, correlation=1000 + number))
        steps.append(ProfiledStep(BASE + round(at * 1000), BASE + round(at * 1000) + 1_000_000))
    recording = Recorded(read_trace(trace_of(*events)), "virtual").add_to(
        Recording(start_ns=BASE, end_ns=steps[-1].end_ns, thread=3, steps=tuple(steps)), 0
    )
    found = analyse(recording)
    assert len(recording.steps) == 18  # the first and the last reach beyond the window
    assert found.severity in (Severity.HIGH, Severity.NOT_SURE)
    assert found.idle_by_cause[Cause.ALLOCATOR] == len(found.steps) * 500_000


def test_device_that_was_not_looked_into_is_told():
    recording = Recorded(None, "H100", "another profiler was running").add_to(Recording(), 0)
    assert not recording.is_complete
    assert "another profiler" in recording.caveats[0]


def test_trace_that_torch_writes_here_has_the_form_that_is_read(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4).sum()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    import json

    trace = json.loads((tmp_path / "t.json").read_text())
    assert {"traceEvents", "baseTimeNanoseconds"} <= trace.keys()
    operators = [each for each in trace["traceEvents"] if each.get("cat") == "cpu_op"]
    assert {"ph", "ts", "dur", "name", "tid", "args"} <= operators[0].keys()
    assert read_trace(trace).activities == ()
