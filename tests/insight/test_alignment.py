"""Lines from one window for the times of another, and the lines that PyTorch's profiler gives."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from millstream.insight import Activity, HostSpan, LaunchCall, ProfiledStep, Recording
from millstream.insight.causes import Cause
from millstream.insight.profiler.alignment import lines_from
from millstream.insight.profiler.kineto import DeviceTrace
from millstream.insight.profiler.looking import without_looking
from millstream.trace import device_profile
from millstream.trace.device_profile import DeviceWindow, Recorded
from millstream.trace.stacks import CallStacks
from tests.insight.virtual import line

NAMES = st.lists(st.sampled_from(["gemm", "relu", "copy", "wait"]), min_size=1, max_size=12)


def window(steps, *, lined, slow=1, start=0):
    """A trace whose steps make these calls; with ``lined``, the k-th of a name in its step is at line 100 k + name."""
    launches, activities, spans, marks, now = [], [], [], [], start
    for names in steps:
        begin = now
        for at, name in enumerate(names):
            number, stack = len(launches) + len(spans), ()
            if lined:
                stack = line(100 * names[:at].count(name) + ["gemm", "relu", "copy", "wait"].index(name))
            if name == "wait":
                spans.append(HostSpan(3, now, now + 5 * slow, Cause.SYNC, stack, "cudaStreamSynchronize"))
            else:
                launches.append(LaunchCall(number, 3, now, now + 5 * slow, stack=stack, module=name if lined else ""))
                activities.append(Activity(now + 2 * slow, now + 4 * slow, name=name, launch=number))
            now += 10 * slow
        marks.append(ProfiledStep(begin, now))
    return DeviceTrace(tuple(activities), tuple(launches), tuple(spans), ()), marks


@given(st.lists(NAMES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_same_steps_get_all_lines_whatever_they_took(steps, dice):
    names = dice.choice(steps)
    expected, marks = window([names] * 3, lined=True)
    bare, _ = window([names] * 3, lined=False)
    other, other_marks = window([names] * 2, lined=True, slow=3, start=5000)
    found = lines_from(bare, marks, other, other_marks)
    assert (found.launches, found.spans, found.share) == (expected.launches, expected.spans, 1.0)


def test_calls_that_are_missing_in_the_other_window_have_no_line_and_many_of_them_leave_all_as_it_was():
    names = ["gemm", "relu", "gemm", "wait", "relu", "copy", "gemm", "gemm", "relu"]
    bare, marks = window([names], lined=False)
    other, other_marks = window([names[:-1]], lined=True)
    found = lines_from(bare, marks, other, other_marks)
    assert found.share == 8 / 9
    assert [bool(each.stack) for each in found.launches] == [True] * 7 + [False]
    other, other_marks = window([names[:4]], lined=True)
    assert lines_from(bare, marks, other, other_marks).launches == bare.launches


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        y = self.layer1(x)  # linear
        return y.relu()  # relu


def test_each_operator_has_its_line_and_module_also_in_the_backward_pass(tmp_path):
    model = nn.Sequential(Block())
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, with_stack=True) as profiler:
        loss = model(torch.randn(2, 4)).sum()
        loss.item()  # item
        loss.backward()  # backward
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    trace = json.loads((tmp_path / "t.json").read_text())
    stacks = CallStacks(profiler.profiler.kineto_results.experimental_event_tree(), trace, sys.path)
    source = Path(__file__).read_text(encoding="utf-8").splitlines()

    def at(name):
        event = next(each for each in trace["traceEvents"] if each.get("name") == name)
        middle = trace["baseTimeNanoseconds"] + round((event["ts"] + event["dur"] / 2) * 1000)
        stack, module = stacks.at(event["tid"], middle)
        mine = next(site for site in stack if site.file == __file__)
        return source[mine.line - 1].partition("# ")[2], module

    assert at("aten::addmm") == ("linear", "0.layer1.0")
    assert at("aten::relu") == ("relu", "0")
    assert at("aten::_local_scalar_dense") == ("item", "")
    assert at("ReluBackward0") == ("relu", "0")
    assert at("AddmmBackward0") == ("linear", "0.layer1.0")
    assert stacks.at(999, 0) == ((), "")


def event_of(kind, start, end, children=(), **fields):
    shown = {"name": "aten::item", "start_tid": fields.pop("start_tid", 1), "start_time_ns": start, "end_time_ns": end}
    extra = type(kind, (), fields)()
    return SimpleNamespace(extra_fields=extra, children=list(children), **shown)


def test_function_that_calls_nothing_known_has_no_line_of_its_own():
    """As Python 3.12.0 to 3.12.4 show it: the call of ``item`` is not there, the operator is."""

    def place(number, function):
        return SimpleNamespace(file_name="/u/train.py", line_number=number, function_name=function)

    operator = event_of("_ExtraFields_TorchOp", 20, 30, sequence_number=-1)
    python = functools.partial(event_of, "_ExtraFields_PyCall", module=None)
    inner = python(10, 40, [operator], caller=place(9, "<module>"), callsite=place(3, "f"))
    outer = place(7, "<module>")  # the line that ran when the window began
    root = python(0, 99, [inner], caller=outer, callsite=outer)
    stacks = CallStacks([root], {}, [])
    assert [site.line for site in stacks.at(1, 25)[0]] == [9]
    assert stacks.at(1, 50) == ((), "")


def test_launch_of_the_autograd_thread_has_the_lines_of_its_forward_operator():
    """CUPTI's number of that thread is not the system's; it runs an operator at that time, and no other thread does."""

    def place(number, function):
        return SimpleNamespace(file_name="/u/train.py", line_number=number, function_name=function)

    forward = event_of("_ExtraFields_TorchOp", 11, 19, sequence_number=5)
    python = functools.partial(event_of, "_ExtraFields_PyCall", module=None)
    model = python(10, 20, [forward], caller=place(4, "train"), callsite=place(9, "forward"))
    wait = python(30, 60, caller=place(5, "train"), callsite=place(1, "backward"))
    other = python(0, 99, start_tid=3, caller=place(80, "pin"), callsite=place(81, "get"))
    inner = event_of("_ExtraFields_TorchOp", 41, 44, sequence_number=-1)
    backward = event_of("_ExtraFields_TorchOp", 40, 45, [inner], sequence_number=5, start_tid=2)
    backward.name = "MmBackward0"
    stacks = CallStacks([other, model, wait, backward], {}, [])
    assert [site.line for site in stacks.at(-77, 42)[0]] == [4]
    assert [site.line for site in stacks.at(-77, 50)[0]] == [5]


def test_two_windows_are_recorded_by_the_count_of_steps(monkeypatch, tmp_path):
    """With the CPU's events in the place of the device's, which has none here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "virtual")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler.ProfilerActivity, "CUDA", torch.profiler.ProfilerActivity.CPU, raising=False)
    monkeypatch.setattr("millstream.trace.agenda.ENOUGH_NS", 10**15)
    recorded = []
    monkeypatch.setattr(
        "millstream.trace.device_profile.read_trace",
        lambda trace: recorded.append(trace) or DeviceTrace((), (), (), ()),
    )
    hurried = []
    window = DeviceWindow(on_times=hurried.append)
    for _ in range(40):
        torch.ones(3).neg()
        window.on_step("optimizer")
    assert isinstance(window.close(0), Recorded)
    found = [sum(each.get("name") == "aten::neg" for each in trace["traceEvents"]) for trace in recorded]
    assert found == [3, 20]  # of the window with lines, and of that with times
    assert [span.cause for span in window.spans] == [Cause.PROFILER] * 4
    assert hurried == [True, False]
    assert not window._folder.exists()


@pytest.mark.parametrize("waits", [6, 9, 12, 28, 31])  # its warm-up is before, within and between the windows
def test_profiler_of_the_script_with_a_schedule_has_its_steps(monkeypatch, waits):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "virtual")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler.ProfilerActivity, "CUDA", kinds[0], raising=False)
    window, seen = DeviceWindow(), []
    schedule = torch.profiler.schedule(wait=waits, warmup=2, active=2, repeat=1)

    def tell(profiler):
        seen.append(sum(event.name == "aten::neg" for event in profiler.events()))

    with torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=tell) as profiler:
        for _ in range(45):
            torch.ones(3).neg()
            window.on_step("optimizer")
            profiler.step()
    window.close(0)
    assert seen == [2]


@pytest.mark.parametrize(
    ("version", "before", "within"),
    [("13.0", None, "1"), ("12.6", None, "1"), ("12.4", None, None), (None, None, None), ("13.0", "0", "0")],
)
def test_profiler_is_detached_where_that_is_safe_and_the_user_does_not_say_otherwise(
    monkeypatch, version, before, within
):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if before is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", before)
    with device_profile._detaching():
        assert os.environ.get("TEARDOWN_CUPTI") == within
    assert os.environ.get("TEARDOWN_CUPTI") == before


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(("other", "is_told"), [(100, False), (80, True)])
def test_looking_that_makes_steps_much_longer_is_told_of(other, is_told, side):
    trace, marks = window([["gemm"] * 10] * 20, lined=False)
    edge, count = (marks[-1].end_ns, 60) if side == "after" else (marks[0].start_ns - 9 * other, 9)
    others = [ProfiledStep(edge + number * other, edge + (number + 1) * other) for number in range(count)]
    steps = (*marks, *others) if side == "after" else (*others, *marks)
    run = Recording(steps=steps, thread=7, end_ns=steps[-1].end_ns, cost_share=0.01)
    recording = Recorded(trace, "virtual", over=35).add_to(run, 0)
    assert recording.looking_slowed == pytest.approx(100 / other - 1)
    longer_ns = sum(step.end_ns - step.start_ns for step in recording.steps) / 100 * (100 - other)
    assert recording.cost_share == pytest.approx(0.01 + longer_ns / run.end_ns)
    assert (recording.later_step_ns is None) == (side == "before")
    assert any("25 % longer" in each for each in without_looking(recording).caveats) == is_told


def test_waits_of_other_python_threads_are_left_out():
    trace, marks = window([["gemm", "wait", "gemm", "wait"]] * 3, lined=False)
    mine, other = trace.spans[0], replace(trace.spans[1], thread=99)
    trace = replace(trace, spans=(mine, other))
    recording = Recording(steps=tuple(marks), thread=7)
    found = Recorded(trace, "virtual", other_threads=frozenset({99})).add_to(recording, 0)
    assert [(span.thread, span.start_ns) for span in found.spans] == [(7, mine.start_ns)]
