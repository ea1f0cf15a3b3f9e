"""Diagnoses on a virtual device whose causes are known, and what taking them away gives."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.insight import (
    RECEIVE_NS,
    Activity,
    ActivityKind,
    Asleep,
    Cause,
    HostSpan,
    LaunchCall,
    Loader,
    Note,
    ProfiledStep,
    Recording,
    Sample,
    Severity,
    Site,
    analyse,
)
from millstream.report.idle import profile_picture as report_picture
from millstream.report.idle import to_page, to_picture, to_text, to_trace
from millstream.report.idle.drawing import COLOURS
from tests.insight.virtual import LIBRARY, THREAD, USER, line, serial_recording, with_stall

US, MS = 1_000, 1_000_000
STEPS = 30


def launches(number, length=10 * US, place=5):
    return [(None, length, place)] * number


PLANTED = {
    Cause.DATA_WAIT: ([(Cause.DATA_WAIT, 60 * MS, 41), *launches(4)], [5 * MS] * 4),
    Cause.PYTHON: ([*launches(2), (Cause.PYTHON, 15 * MS, 42), *launches(2)], [MS] * 4),
    Cause.ALLOCATOR: ([*launches(4), (Cause.ALLOCATOR, 20 * MS, 43)], [2 * MS] * 4),
    Cause.IO: ([*launches(4), (Cause.IO, 30 * MS, 44)], [5 * MS] * 4),
    Cause.GC: ([*launches(4), (Cause.GC, 20 * MS, 45)], [2 * MS] * 4),
    Cause.LAUNCH: (launches(400, 8 * US, 46), [2 * US] * 400),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_planted_cause_leads_with_its_line(cause):
    host, kernels = PLANTED[cause]
    found = analyse(serial_recording(host, kernels, steps=STEPS))
    assert found.severity is Severity.HIGH
    assert found.leading.cause is cause
    assert found.leading.site.line in range(41, 47)
    assert sum(found.idle_by_cause.values()) == found.idle_ns


def test_wait_that_empties_the_queue_leads_and_its_refill_belongs_to_it():
    # The host reads the loss in the middle of a step, then launches slowly: the device starves until two are queued.
    host = [*launches(2, 300 * US), (Cause.SYNC, 0, 51), *launches(2, 300 * US)]
    found = analyse(serial_recording(host, [320 * US] * 4, steps=STEPS))
    assert found.leading.cause is Cause.SYNC
    assert found.leading.site.line == 51


def test_long_python_after_a_wait_is_python_and_not_the_waits_refill():
    host = [*launches(4), (Cause.SYNC, 0, 51), (Cause.PYTHON, 15 * MS, 52)]
    found = analyse(serial_recording(host, [MS] * 4, steps=STEPS))
    assert found.leading.cause is Cause.PYTHON
    assert found.leading.site.line == 52
    assert found.leading.recoverable_share == pytest.approx(15 / 19, rel=0.1)


def test_reads_that_keep_the_queue_empty_lead_and_their_launches_are_no_run():
    # 8 ms of kernels, launched in time; then the host reads 20 results, each of two small kernels.
    host = [*launches(8, 60 * US), *[*launches(2, 60 * US), (Cause.SYNC, 5 * US, 51)] * 20]
    found = analyse(serial_recording(host, [MS] * 8 + [10 * US] * 40, steps=STEPS))
    assert (found.severity, found.leading.cause) == (Severity.HIGH, Cause.SYNC)
    assert found.recoverable[Cause.SYNC] / len(found.steps) == pytest.approx(2.4 * MS, rel=0.1)
    assert found.recoverable.get(Cause.LAUNCH, 0) < found.recoverable[Cause.SYNC]


def test_read_by_a_blocking_copy_is_a_wait_as_others_are():
    launched, activities, waits, steps = [], [], [], []
    for number in range(STEPS):  # 8 ms of kernels, a value read by a copy, 4 ms of Python
        start, first = 12 * MS * number, 9 * number
        launched += [LaunchCall(first + k, THREAD, start + 60 * US * k, start + 60 * US * (k + 1)) for k in range(8)]
        activities += [Activity(start + MS * k, start + MS * (k + 1), launch=first + k) for k in range(8)]
        waits.append(HostSpan(THREAD, start + 500 * US, start + 8 * MS, Cause.SYNC, line(51), "cudaMemcpyAsync"))
        launched.append(LaunchCall(first + 8, THREAD, start + 500 * US, start + 8 * MS, "cudaMemcpyAsync", line(51)))
        read = ActivityKind.COPY, "Memcpy DtoH (Device -> Pageable)", first + 8, None, True
        activities.append(Activity(start + 8 * MS - US, start + 8 * MS, 0, *read))
        steps.append(ProfiledStep(start, start + 12 * MS))
    recording = Recording(
        device="virtual", is_synchronous=False, end_ns=12 * MS * STEPS, thread=THREAD, steps=tuple(steps),
        spans=tuple(waits), activities=tuple(activities), launches=tuple(launched), library_roots=(LIBRARY,),
    )  # fmt: skip
    found = analyse(recording)
    assert found.recoverable[Cause.SYNC] == pytest.approx(4 * MS * len(found.steps), rel=0.1)


def test_queue_that_launching_never_fills_is_launching_after_one_wait_too():
    recording = serial_recording(launches(400, 8 * US, 46), [2 * US] * 400, steps=STEPS)
    at = recording.steps[12].start_ns
    found = analyse(replace(recording, spans=(HostSpan(THREAD, at - 1, at, Cause.SYNC, line(51)),)))
    assert found.leading.cause is Cause.LAUNCH
    assert found.idle_by_cause[Cause.SYNC] <= 8 * US
    assert found.recoverable[Cause.LAUNCH] == pytest.approx(0.75 * found.window_ns, rel=0.1)


def test_what_comes_before_a_run_of_launches_is_not_won_back_with_it():
    host = [(Cause.GC, 5 * MS, 45), *launches(60, 40 * US)]
    found = analyse(serial_recording(host, [20 * US] * 60, steps=STEPS))
    assert found.leading.cause is Cause.GC
    assert found.recoverable[Cause.GC] / len(found.steps) == pytest.approx(5 * MS, rel=0.02)
    assert found.recoverable[Cause.LAUNCH] / len(found.steps) < 2.5 * MS  # launching takes 2.4 ms


def test_collection_during_a_compilation_is_the_compilations():
    recording = serial_recording([(Cause.COMPILE, 20 * MS, 8), *launches(4)], [MS] * 4, steps=STEPS)
    within = [replace(s, start_ns=s.start_ns + MS, end_ns=s.end_ns - MS, cause=Cause.GC) for s in recording.spans]
    found = analyse(replace(recording, spans=(*recording.spans, *within)))
    assert Cause.GC not in found.idle_by_cause
    assert not any(row.cause is Cause.GC for row in found.rows)
    assert found.leading.cause is Cause.COMPILE


def test_what_the_profiler_takes_is_no_time_of_the_run():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [5 * MS] * 4, steps=60)
    run_ns = recording.end_ns - recording.steps[0].end_ns + 9 * MS
    at = recording.steps[40].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 9 * MS, Cause.IO))
    at = recording.steps[50].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 600 * MS, Cause.PROFILER))
    within = HostSpan(THREAD, at + MS, at + 500 * MS, Cause.GC, line(7))
    found = analyse(replace(recording, spans=(*recording.spans, within)))
    rare = [row for row in found.rows if row.is_rare]
    assert [(row.cause, row.idle_ns) for row in rare] == [(Cause.IO, 9 * MS)]
    assert rare[0].share == pytest.approx(9 * MS / run_ns)


def test_event_in_one_of_few_steps_of_a_window_is_not_scaled_up_by_them():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [5 * MS] * 4, steps=5)
    at = recording.steps[3].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 900 * MS, Cause.IO))
    found = analyse(replace(recording, end_ns=recording.end_ns + 90_000 * MS))  # the window is a part of the run
    assert [(row.share, row.is_rare) for row in found.rows if row.cause is Cause.IO] == [
        (pytest.approx(0.01, abs=1e-3), True)
    ]
    assert found.severity is Severity.HEALTHY


def test_rare_event_that_waits_for_queued_kernels_first_costs_what_the_device_idles():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [5 * MS] * 4, steps=60)
    at = recording.steps[40].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 9 * MS, Cause.IO))
    early = replace(recording.spans[-1], start_ns=at - 18 * MS)
    waits = (span for span in recording.spans[:-1] if not early.start_ns <= span.end_ns <= at)
    found = analyse(replace(recording, spans=(*waits, early)))
    assert [(row.cause, row.idle_ns) for row in found.rows if row.is_rare] == [(Cause.IO, 9 * MS)]


def test_wait_whose_lines_are_all_a_librarys_gets_the_line_of_a_sample():
    host = [*launches(2, 300 * US), (Cause.SYNC, 0, 51), *launches(2, 300 * US)]
    recording = serial_recording(host, [320 * US] * 4, steps=STEPS)
    outer = Site(f"{LIBRARY}runpy.py", 9, "run")
    spans = tuple(replace(span, stack=(outer,)) for span in recording.spans)
    looks = tuple(Sample(THREAD, s.start_ns, s.end_ns, (*line(51), outer), 0) for s in spans)
    found = analyse(replace(recording, spans=spans, samples=looks))
    assert found.leading.cause is Cause.SYNC
    assert found.leading.site.line == 51


def test_wait_with_work_queued_after_it_is_no_loss():
    recording = serial_recording(launches(4), [5 * MS] * 4, steps=STEPS)
    # The host waits for the first kernel of each step; three more are queued.
    ends = [each.end_ns for each in recording.activities[::4]]
    waits = tuple(HostSpan(THREAD, end - MS, end, Cause.SYNC, line(60)) for end in ends)
    found = analyse(replace(recording, spans=waits))
    assert found.idle_by_cause.get(Cause.SYNC, 0) == 0


def test_full_device_is_healthy():
    found = analyse(serial_recording(launches(8), [5 * MS] * 8, steps=STEPS))
    assert found.severity is Severity.HEALTHY
    assert found.leading is None


def test_two_stalls_are_ranked_and_add_up():
    host = [(Cause.DATA_WAIT, 20 * MS, 41), *launches(2), (Cause.PYTHON, 7 * MS, 42), *launches(2)]
    found = analyse(serial_recording(host, [MS] * 4, steps=STEPS))
    assert [row.cause for row in found.rows[:2]] == [Cause.DATA_WAIT, Cause.PYTHON]
    assert sum(found.idle_by_cause.values()) == found.idle_ns


def test_python_hidden_behind_queued_kernels_is_nothing_to_win_back():
    # 15 ms of Python while 20 ms of kernels are queued: the device does not notice, and no gain is promised.
    host = [*launches(4), (Cause.PYTHON, 15 * MS, 42)]
    found = analyse(serial_recording(host, [5 * MS] * 4, steps=STEPS))
    assert found.severity is Severity.HEALTHY
    assert found.recoverable.get(Cause.PYTHON, 0) < 0.05 * found.window_ns


@given(
    st.lists(
        st.sampled_from([Cause.DATA_WAIT, Cause.PYTHON, Cause.GC, Cause.IO, Cause.SYNC, None, None]),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_gain_is_what_the_twin_without_the_cause_takes(causes, data):
    host = [(cause, data.draw(st.integers(1, 900)) * US, 10 + i) for i, cause in enumerate(causes)]
    kernels = [data.draw(st.integers(1, 900)) * US for each in causes if each is None]
    whole = serial_recording([*host, *launches(1)], [*kernels, US], steps=12)
    found = analyse(whole)
    for cause in {each for each in causes if each is not None} - {Cause.SYNC}:
        twin = serial_recording(
            [each for each in [*host, *launches(1)] if each[0] is not cause], [*kernels, US], steps=12
        )
        gain = whole.end_ns - twin.end_ns
        promised = found.recoverable.get(cause, 0) / len(found.steps) * 12
        slack = 0.25 * gain + 0.1 * whole.end_ns  # its warm-up and its end are not judged
        assert promised <= gain + slack


CLEAN = {
    "large kernels": (launches(8), [5 * MS] * 8),
    "a read at the end of a full step": ([*launches(8), (Cause.SYNC, 10 * US, 61)], [5 * MS] * 8),
    "two percent of waiting": ([(Cause.DATA_WAIT, 800 * US, 62), *launches(8), (Cause.SYNC, 0, 63)], [5 * MS] * 8),
    "much Python after long kernels": ([*launches(4), (Cause.PYTHON, 12 * MS, 64)], [5 * MS] * 4),
    "small kernels launched ahead of large ones": (launches(40), [MS, *[20 * US] * 19] * 2),
}


@pytest.mark.parametrize("name", CLEAN)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_clean_run_with_jitter_raises_no_alarm(name, seed):
    host, kernels = CLEAN[name]
    dice = random.Random(seed)

    def jitter(length):
        return round(length * dice.uniform(0.8, 1.3))

    # Steps that differ: as many of them in a row are one "step" of the virtual run.
    segments = [(cause, jitter(length), place) for _ in range(25) for cause, length, place in host]
    recording = serial_recording(segments, [jitter(each) for _ in range(25) for each in kernels], steps=1)
    marks = [recording.end_ns * number // 25 for number in range(26)]
    found = analyse(replace(recording, steps=tuple(ProfiledStep(a, b) for a, b in pairwise(marks))))
    assert found.severity is Severity.HEALTHY, found.rows[:2]


@pytest.mark.parametrize("late", [0, 5 * US])  # the call returns before the copy's last bytes have arrived
def test_copy_that_nothing_hides_is_exposed_and_not_idle(late):
    steps, activities, calls, now = [], [], [], 0
    for number in range(STEPS):
        start = now
        calls += [
            LaunchCall(2 * number, THREAD, now, now + 30 * MS - late, stack=line(33)),
            LaunchCall(2 * number + 1, THREAD, now + 30 * MS, now + 31 * MS),
        ]
        activities.append(
            Activity(
                now,
                now + 30 * MS,
                0,
                ActivityKind.COPY,
                "Memcpy HtoD (Pageable -> Device)",
                2 * number,
                is_pageable=True,
            )
        )
        activities.append(Activity(now + 31 * MS, now + 51 * MS, 0, launch=2 * number + 1))
        now += 51 * MS
        steps.append(ProfiledStep(start, now))
    recording = Recording(
        device="virtual", is_synchronous=False, end_ns=now, thread=THREAD, steps=tuple(steps),
        activities=tuple(activities), launches=tuple(calls), library_roots=(LIBRARY,),
    )  # fmt: skip
    found = analyse(recording)
    assert found.leading.cause is Cause.COPY
    assert found.leading.site.line == 33
    assert found.leading.recoverable_share == pytest.approx(30 / 51, rel=0.05)
    assert found.severity is Severity.HIGH
    assert found.exposed[Cause.COPY] == len(found.steps) * 30 * MS
    assert found.idle_ns == len(found.steps) * MS


def test_unknown_time_is_printed_and_comes_first_where_it_is_much():
    recording = serial_recording([*launches(2), (Cause.WAITING, 9 * MS, 42)], [MS] * 2, steps=STEPS)
    found = analyse(replace(recording, spans=()))
    assert found.severity is Severity.NOT_SURE
    assert found.idle_by_cause[Cause.UNKNOWN] > 0.1 * found.window_ns


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda r: replace(r, activities=r.activities[::2]), "lost records"),
        (lambda r: replace(r, activities=()), "no kernel"),
        (lambda r: replace(r, steps=()), "no step"),
        (lambda r: replace(r, steps=r.steps[:2]), "too few"),
        (lambda r: replace(r, is_complete=False, caveats=("cut short",)), "cut short"),
        (
            lambda r: replace(
                r,
                activities=tuple(
                    replace(a, start_ns=a.start_ns - 200 * MS, end_ns=a.end_ns - 200 * MS) for a in r.activities
                ),
            ),
            "clocks",
        ),
        (
            lambda r: replace(
                r, activities=tuple(replace(a, graph=1, launch=a.launch // 3) for a in r.activities[:-4])
            ),
            "",
        ),
    ],
)
def test_incomplete_recording_gets_no_diagnosis(spoil, why):
    recording = spoil(serial_recording(launches(4), [MS] * 4, steps=STEPS))
    found = analyse(recording)
    assert found.severity is Severity.UNRELIABLE
    assert why in found.why_unreliable
    assert found.leading is None


def test_replays_of_one_graph_with_unlike_numbers_of_kernels_are_no_diagnosis():
    steps, activities, calls, now = [], [], [], 0
    for number in range(STEPS):
        calls.append(LaunchCall(number, THREAD, now, now + 10 * US, "cudaGraphLaunch"))
        kernels = 9 if number % 2 else 10
        activities += [
            Activity(now + (20 + 10 * k) * US, now + (30 + 10 * k) * US, launch=number, graph=3) for k in range(kernels)
        ]
        steps.append(ProfiledStep(now, now + 200 * US))
        now += 200 * US
    recording = Recording(
        device="virtual", is_synchronous=False, end_ns=now, thread=THREAD, steps=tuple(steps),
        activities=tuple(activities), launches=tuple(calls),
    )  # fmt: skip
    assert "9 to 10 kernels" in analyse(recording).why_unreliable


def test_graph_that_was_launched_before_the_window_may_be_cut():
    recording = serial_recording([(None, 10 * US, 5), (Cause.PYTHON, MS, 6)], [MS], steps=STEPS)
    replays = [
        replace(each, graph=3, start_ns=each.start_ns + part, end_ns=each.start_ns + part + 10)
        for each in recording.activities
        for part in (0, 20, 40)
    ]
    cut = replace(replays[0], launch=10_000)
    assert "lost" not in analyse(replace(recording, activities=(cut, *replays))).why_unreliable
    assert "1 to 3 kernels" in analyse(replace(recording, activities=(replays[0], *replays[3:]))).why_unreliable


def test_workers_that_keep_up_are_counted():
    host, kernels = [(Cause.DATA_WAIT, 80 * MS, 41), *launches(4)], [5 * MS] * 4
    loaders = (Loader(2, 200 * MS, 40, Site(USER, 12, "__getitem__")),)
    found = analyse(serial_recording(host, kernels, steps=STEPS, loaders=loaders, num_cores=16))
    assert found.workers_needed == round(200 * MS / found.free_step_ns + 0.5)
    assert found.workers_sensible == found.workers_needed
    few = analyse(serial_recording(host, kernels, steps=STEPS, loaders=loaders, num_cores=2))
    assert few.workers_sensible == 3
    assert few.recoverable[Cause.DATA_WAIT] < found.recoverable[Cause.DATA_WAIT]


def test_operators_called_too_slowly_for_the_device_are_launching_and_no_python_of_the_users():
    recording = serial_recording([*launches(2), (Cause.PYTHON, 5 * MS, 42), *launches(2)], [MS] * 4, steps=STEPS)
    operator = Site("/usr/lib/python3/torch/nn/modules/linear.py", 134, "forward")
    looks = tuple(replace(each, stack=(operator, *each.stack), in_bytecode=False) for each in recording.samples)
    found = analyse(replace(recording, samples=looks))
    assert found.leading.cause is Cause.LAUNCH
    assert (found.leading.site.line, found.leading.inside) == (42, operator)
    assert Cause.PYTHON not in found.idle_by_cause
    gain = found.recoverable[Cause.LAUNCH] / found.window_ns
    assert gain == pytest.approx(1 / 5, abs=0.05)  # four of five milliseconds are the device's


def test_python_ends_at_the_next_launch_and_not_at_the_last_look_into_it():
    host = [*launches(4), (Cause.SYNC, 0, 51), (Cause.PYTHON, 30 * MS, 52)]
    recording = serial_recording(host, [MS] * 4, steps=STEPS)
    operator = Site(f"{LIBRARY}torch/nn/modules/linear.py", 134, "forward")
    looks = []
    for each in recording.samples:  # the last look into the loop is after two thirds of it, the next into an operator
        middle = each.end_ns - 10 * MS
        looks.append(replace(each, end_ns=middle, cpu_ns=middle - each.start_ns))
        looks.append(Sample(THREAD, middle, each.end_ns + 2 * MS, (operator, *line(10)), 12 * MS, 0, False))
    found = analyse(replace(recording, samples=tuple(looks)))
    assert found.leading.cause is Cause.PYTHON
    assert found.leading.site.line == 52
    assert found.idle_by_cause[Cause.PYTHON] == pytest.approx(30 * MS * len(found.steps), rel=0.02)


def test_rare_event_is_counted_over_the_run_and_not_scaled_up():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [5 * MS] * 4, steps=60)
    at = recording.steps[40].start_ns
    found = analyse(with_stall(recording, HostSpan(THREAD, at, at + 4 * MS, Cause.GC, line(7))))
    row = next(row for row in found.rows if row.cause is Cause.GC)
    assert row.is_rare
    assert row.idle_ns == 4 * MS
    assert found.severity is Severity.HEALTHY


def test_one_compilation_is_no_fault_and_recompilations_are():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [MS] * 4, steps=60)
    at = recording.steps[40].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 100 * MS, Cause.COMPILE, line(8)))
    assert analyse(recording).severity is not Severity.HIGH
    note = Note(Cause.COMPILE, at, Site(USER, 8), "size mismatch")
    found = analyse(replace(recording, notes=(note,)))
    assert found.severity is Severity.HIGH
    assert found.leading.cause is Cause.COMPILE


def test_on_a_cpu_operators_are_busy_and_a_python_loop_is_not():
    samples, steps, now = [], [], 0
    for _ in range(STEPS):
        start = now
        for number in range(10):
            stack = line(70) if number < 4 else (Site("/x/torch/nn/linear.py", 9, "forward"), *line(71))
            samples.append(Sample(THREAD, now, now + 4 * MS, stack, 4 * MS, 0, number < 4))
            now += 4 * MS
        steps.append(ProfiledStep(start, now))
    found = analyse(Recording(end_ns=now, thread=THREAD, steps=tuple(steps), samples=tuple(samples)))
    assert found.idle_ns == len(found.steps) * 16 * MS
    assert found.leading.cause is Cause.PYTHON
    assert found.leading.site.line == 70
    assert found.leading.recoverable_share == pytest.approx(0.4)


def loop_with_loader_in_process(*, batch, busy, host):
    """A loop whose batches the process makes itself; the sampler looks every 4 ms, in the step and in the loader."""
    loop, make = line(20), (Site(USER, 13, "__getitem__"), Site("/usr/lib/python3/fetch.py", 5, "fetch"), *line(20))
    train = (Site("/usr/lib/python3/sgd.py", 7, "step"), *line(24))
    now, number, spans, activities, calls, marks = 0, 0, [], [], [], [0]
    for _ in range(STEPS):
        spans.append(HostSpan(THREAD, now, now + batch, Cause.IN_PROCESS, loop))
        now += batch
        calls.append(LaunchCall(number, THREAD, now, now + 10 * US))
        activities.append(Activity(now + 10 * US, now + 10 * US + busy, launch=number))
        number, now = number + 1, now + host
        marks.append(now)
    looks, last = [], 0
    for at in range(3 * MS, now, 4 * MS):
        is_loading = any(span.start_ns <= at < span.end_ns for span in spans)
        looks.append(Sample(THREAD, last, at, make if is_loading else train, at - last, 0, False))
        last = at
    return Recording(
        device="virtual", is_synchronous=False, end_ns=now, thread=THREAD, library_roots=(LIBRARY,),
        steps=tuple(ProfiledStep(a, b) for a, b in pairwise(marks)), spans=tuple(spans), samples=tuple(looks),
        activities=tuple(activities), launches=tuple(calls),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [2 * MS, 7 * MS, 17 * MS])  # shorter than the time between two looks, and longer
def test_waiting_for_data_has_the_loaders_line_and_none_of_the_steps(batch):
    found = analyse(loop_with_loader_in_process(batch=batch, busy=500 * US, host=5 * MS))
    rows = [row for row in found.rows if row.cause is Cause.IN_PROCESS]
    assert {row.site.line for row in rows} == {13}
    assert sum(row.idle_ns for row in rows) == len(found.steps) * batch


def test_kernels_are_drawn_with_name_module_and_line():
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [MS] * 4, steps=STEPS)
    found = analyse(
        replace(
            recording,
            activities=tuple(replace(each, name="gemm<a>") for each in recording.activities),
            launches=tuple(replace(each, module="layer1.conv2") for each in recording.launches),
        )
    )
    page = to_page(found)
    assert page.count("gemm&lt;a&gt;, in layer1.conv2, train.py:5</title>") == 2 * 4  # in each of the two steps drawn
    assert to_trace(found).count("in layer1.conv2") == 4 * len(found.steps)
    assert page.count("sync: train.py:9") >= 2  # the training thread's row
    assert page.count(">queue, up to 4<") == 2
    assert "below 1 %</summary>" in page


def test_picture_is_wellformed_and_has_the_diagnosis_and_every_long_piece_of_the_median_step():
    host, kernels = PLANTED[Cause.PYTHON]
    found = analyse(serial_recording(host, kernels, steps=STEPS))
    picture = ElementTree.fromstring(to_picture(found))
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("HIGH ") for text in texts)
    assert {"python", "idle, by cause", "training thread"} <= set(texts)
    colours = Counter(each.get("fill") for each in picture.iter("{http://www.w3.org/2000/svg}rect"))
    assert colours[COLOURS[Cause.PYTHON]] == 1 + len(found.steps) + 2  # legend, bars, its gap and the thread's row
    assert len(to_picture(found)) < len(to_page(found))


def test_picture_cuts_no_line_off(monkeypatch):
    found = analyse(serial_recording(*PLANTED[Cause.PYTHON], steps=STEPS))

    def said():
        texts = ElementTree.fromstring(to_picture(found)).iter("{http://www.w3.org/2000/svg}text")
        return [each.text for each in texts if each.get("class") == "say"]

    whole = said()
    monkeypatch.setattr(report_picture, "_FITS", 60)
    assert max(map(len, said())) <= 60 < max(map(len, whole))
    assert " ".join(said()).split() == " ".join(whole).split()


def test_what_runs_a_script_is_no_line_of_it():
    runner = Site("/opt/lib/millstream/cli/running.py", 50, "run_script")
    starter = Site("/home/user/bench.py", 3, "main")
    recording = Recording(library_roots=(LIBRARY, "/opt/lib/"))
    assert recording.user_site((*line(4), runner, starter)).line == 4
    assert recording.user_site((runner, starter)) is None
    assert not recording.knows_line((runner, starter))
    module = Site(f"{LIBRARY}pkg/train.py", 8, "main")
    assert recording.user_site((module, Site("<frozen runpy>", 88, "_run_code"), runner)) == module


@pytest.mark.parametrize(("num_looks", "num_hooked", "is_told"), [(4, 0, False), (5, 0, True), (0, 6, True)])
def test_run_too_short_for_looks_has_no_diagnosis_unless_hooks_tell(num_looks, num_hooked, is_told):
    steps = tuple(ProfiledStep(at * MS, (at + 1) * MS) for at in range(12))
    looks = tuple(Sample(THREAD, at * MS, (at + 1) * MS, line(5), MS, 0, True) for at in range(11 - num_looks, 11))
    spans = tuple(HostSpan(THREAD, at * MS, (at + 1) * MS, Cause.IN_PROCESS, line(6)) for at in range(12)[-num_hooked:])
    spans = spans if num_hooked else ()
    found = analyse(Recording(thread=THREAD, end_ns=12 * MS, steps=steps, samples=looks, spans=spans))
    assert (found.severity is not Severity.UNRELIABLE) == is_told
    assert ("too short to be looked into (4 looks)" in to_text(found)) == (not is_told)
    assert ("does not compute" in to_text(found)) == is_told


def test_checkpoint_with_collections_within_is_counted_once():
    recording = serial_recording([*launches(4), (Cause.IO, 30 * MS, 44)], [5 * MS] * 4, steps=STEPS)
    save = next(span for span in recording.spans if span.start_ns > recording.steps[20].start_ns)
    gc = HostSpan(THREAD, save.start_ns + MS, save.start_ns + 2 * MS, Cause.GC, line(44))
    row = next(row for row in analyse(replace(recording, spans=(save, gc))).rows if row.cause is Cause.IO)
    assert (row.is_rare, row.num_steps) == (True, 1)


def test_long_waits_in_few_steps_are_told_by_the_step():
    looks, now, steps = [], 0, []
    for number in range(60):
        length = 300 * MS if number % 10 == 5 else 3 * MS
        state = Asleep.CALL if number % 10 == 5 else Asleep.AWAKE
        stack = line(7) if state is Asleep.CALL else (Site("/x/torch/nn/linear.py", 1, "forward"), *line(5))
        for start in range(now, now + length, 3 * MS):
            ran = 0 if state is Asleep.CALL else 3 * MS
            looks.append(Sample(THREAD, start, start + 3 * MS, stack, ran, 0, False, ran, (), 0, state))
        steps.append(ProfiledStep(now, now := now + length))
    found = analyse(Recording(end_ns=now, thread=THREAD, steps=tuple(steps), samples=tuple(looks)))
    assert "5 of 50 steps, 300 ms each" in to_text(found)


@pytest.mark.parametrize(
    ("ran", "num_workers", "said"), [(0.4, 0, "had 0.8 of 2 proc"), (0.4, 2, "Fewer"), (1, 0, "Fewer")]
)
def test_processors_that_others_take_are_told_from_ones_own_threads(ran, num_workers, said):
    looks = [
        Sample(
            THREAD, at * MS, (at + 1) * MS, line(5), MS // 4, 0, False, round(2 * ran * MS), (), MS // 2, Asleep.AWAKE
        )
        for at in range(100)
    ]
    steps = tuple(ProfiledStep(at * MS, (at + 5) * MS) for at in range(0, 100, 5))
    facts = {"loaders": (Loader(num_workers, num_batches=20),), "num_cores": 2, "end_ns": 100 * MS, "thread": THREAD}
    found = analyse(Recording(steps=steps, samples=tuple(looks), **facts))
    assert found.leading.cause is Cause.DESCHEDULED
    assert said in to_text(found)


@pytest.mark.parametrize(
    ("num_looks", "is_synchronous", "is_judged"), [(60, True, True), (40, True, False), (60, False, False)]
)
def test_run_without_steps_is_judged_as_a_whole_where_enough_was_seen(num_looks, is_synchronous, is_judged):
    looks = tuple(
        Sample(THREAD, at * MS, (at + 1) * MS, line(7), 0, 0, False, 0, (), 0, Asleep.CALL)
        if at % 2
        else Sample(
            THREAD, at * MS, (at + 1) * MS, (Site("/x/torch/nn/linear.py", 1, "forward"), *line(5)), MS, 0, False
        )
        for at in range(num_looks)
    )
    slices = tuple(ProfiledStep(at * num_looks * MS // 20, (at + 1) * num_looks * MS // 20) for at in range(20))
    facts = {
        "thread": THREAD,
        "end_ns": num_looks * MS,
        "steps": slices,
        "samples": looks,
        "caveats": ("no step was seen",),
    }
    found = analyse(Recording("serve.py", has_steps=False, is_synchronous=is_synchronous, **facts))
    text = to_text(found)
    assert (found.severity is Severity.HIGH) == is_judged
    assert ("50 % of the run (30 ms of 60 ms" in text and "60 ms → about 30 ms (2×)" in text) == is_judged
    assert ("No diagnosis: no step was seen." in text) != is_judged


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_keep_up_with_all_batches_of_a_step(num_workers):
    # Each step accumulates gradients over four batches, of 6 ms each, and computes for 3 ms.
    cause, wait = (Cause.DATA_WAIT, 2 * MS) if num_workers else (Cause.IN_PROCESS, 6 * MS)
    recording = serial_recording([(cause, wait, 41), (None, 0, 5), (Cause.SYNC, 0, 6)] * 4, [750 * US] * 4, steps=STEPS)
    loader = Loader(num_workers, batch_ns=6 * MS, num_batches=4 * STEPS)
    found = analyse(replace(recording, loaders=(loader,), num_cores=16))
    assert found.batches_per_step == pytest.approx(4, abs=0.1)
    assert found.workers_needed == 8
    assert "and a step has 4" in to_text(found)
    assert "num_workers=8" in to_text(found)


@pytest.mark.parametrize(
    ("num_workers", "ran", "queued", "advised", "step"),
    [
        (2, 2, 0, "num_workers=8, and a cheaper item", 20),  # they wait for files: processors limit nothing
        (2, 155, 0, "at half its cost a step takes 38.8 ms", 38.75),  # they compute, on all processors there are
        (2, 80, 80, "at half its cost a step takes 40 ms", 40),  # others take one of the two processors
        (1, 155, 0, "num_workers=2", 80),
        (2, None, 0, "num_workers=3", 160 / 3),
    ],
)
def test_gain_of_workers_is_that_of_enough_and_no_more_than_processors_give(num_workers, ran, queued, advised, step):
    recording = serial_recording(
        [(Cause.DATA_WAIT, 160 * MS // num_workers, 41), (None, 0, 5), (Cause.SYNC, 0, 6)], [5 * MS], steps=STEPS
    )
    loader = Loader(
        num_workers,
        160 * MS,
        STEPS,
        batch_ran_ns=None if ran is None else ran * MS,
        batch_queued_ns=queued * MS,
    )
    found = analyse(replace(recording, loaders=(loader,), num_cores=2))
    assert advised in " ".join(to_text(found).split())
    gain = found.recoverable[Cause.DATA_WAIT] / len(found.steps)
    assert found.step_ns - gain == pytest.approx(step * MS, rel=0.03)


@pytest.mark.parametrize(("stays", "severity"), [(0, Severity.HIGH), (18, Severity.MODERATE), (20, Severity.HEALTHY)])
def test_of_the_collector_what_garbage_takes_is_not_promised(stays, severity):
    recording = serial_recording(*PLANTED[Cause.GC], steps=STEPS)
    whole = analyse(recording).recoverable[Cause.GC]
    spans = (replace(s, stays_ns=stays * MS) if s.cause is Cause.GC else s for s in recording.spans)
    found = analyse(replace(recording, spans=tuple(spans)))
    assert found.recoverable[Cause.GC] == pytest.approx(whole * (20 - stays) / 20, abs=1)
    assert found.severity is severity


@pytest.mark.parametrize(("stays", "severity"), [(0, Severity.MODERATE), (120, Severity.HEALTHY)])
def test_of_a_rare_collection_what_garbage_takes_is_not_promised(stays, severity):
    recording = serial_recording([*launches(4), (Cause.SYNC, 0, 9)], [5 * MS] * 4, steps=60)
    at = recording.steps[40].start_ns
    recording = with_stall(recording, HostSpan(THREAD, at, at + 130 * MS, Cause.GC, line(45)))
    spans = (replace(s, stays_ns=stays * MS) if s.cause is Cause.GC else s for s in recording.spans)
    assert analyse(replace(recording, spans=tuple(spans))).severity is severity


@pytest.mark.parametrize(
    ("every", "below", "told"),
    [
        (8, "forward", "not idle, but not training: train.py:60  takes 33 % of the time, in 3 of 24 steps"),
        (8, "_engine_run_backward", ""),  # a term of the loss that few steps have is training
        (2, "forward", ""),  # and so is what half of the steps have
    ],
)
def test_evaluation_within_the_loop_is_told_with_its_line(every, below, told):
    inner = Site(f"{LIBRARY}torch/nn/modules/linear.py", 1, below)
    steps, looks, now = [], [], 0
    for number in range(STEPS):
        start = now
        parts = [(line(20), 10)] + [((inner, *line(65), *line(60)), 40)] * (number % every == every - 1)
        for stack, length in parts:
            for _ in range(length):
                operator = Site("/x/torch/nn/linear.py", 9, "forward")
                looks.append(Sample(THREAD, now, now + MS, (operator, *stack), MS, 0, False))
                now += MS
        steps.append(ProfiledStep(start, now))
    found = analyse(
        Recording(end_ns=now, thread=THREAD, steps=tuple(steps), samples=tuple(looks), library_roots=(LIBRARY,))
    )
    lines = [each.strip() for each in to_text(found).splitlines() if "not training" in each]
    assert lines == ([told] if told else [])
    assert (found.to_dict()["aside"] is not None) == bool(told)
    assert ("not idle, but not training" in to_page(found)) == bool(told)


def test_workers_are_not_advised_for_batches_that_are_made_faster_than_received():
    host = [(Cause.IN_PROCESS, 35 * US, 41), (None, 0, 5), (Cause.SYNC, 0, 6)]
    recording = serial_recording(host, [30 * US], steps=99)
    loader = Loader(0, batch_ns=35 * US, num_batches=99)
    found = analyse(replace(recording, loaders=(loader,), num_cores=16))
    text = to_text(found)
    assert "A batch takes 35 µs to make" in text
    assert "num_workers" not in text


def test_of_workers_no_more_is_promised_than_receiving_leaves():
    recording = serial_recording([(Cause.IN_PROCESS, MS, 41), (None, 0, 5), (Cause.SYNC, 0, 6)], [MS], steps=STEPS)
    found = analyse(replace(recording, loaders=(Loader(0, batch_ns=MS, num_batches=STEPS),), num_cores=16))
    gain = found.recoverable[Cause.IN_PROCESS] / len(found.steps)
    assert gain == pytest.approx(MS - RECEIVE_NS, rel=0.05)
