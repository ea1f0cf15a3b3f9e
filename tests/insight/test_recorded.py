"""Diagnoses on steps that an H100 ran: planted scripts and clean ones of the suite ``idle``, as they were then."""

import random
from pathlib import Path

import pytest

from benchmarks.idle.suite import NUM_JITTERED, with_jitter
from millstream.insight import Cause, Severity, analyse
from tests.insight.recorded import cut, read, write
from tests.insight.virtual import serial_recording

TRACES = Path(__file__).parent / "traces"
PLANTED = {  # cause, lines that are to blame, what of a step there is to win back
    "workers_too_slow": (Cause.DATA_WAIT, {22}, (0.50, 0.58)),
    "host_reads": (Cause.SYNC, {13, 19, 25}, (0.25, 0.35)),
    "pageable_copies": (Cause.COPY, {12}, (0.60, 0.68)),
    "tiny_kernels": (Cause.LAUNCH, {14, 15, 16, 17}, (0.90, 0.97)),
    "python_loop": (Cause.PYTHON, {16}, (0.76, 0.86)),
    "empty_cache": (Cause.ALLOCATOR, {10, 11, 12, 17}, (0.48, 0.58)),
    "collector": (Cause.GC, {18}, (0.73, 0.83)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_found_with_its_lines(name):
    cause, lines, (least, most) = PLANTED[name]
    recording = read(TRACES / f"h100_{name}.json.gz")
    for each in (recording, with_jitter(recording, random.Random(1))):
        found = analyse(each)
        assert (found.severity, found.leading.cause) == (Severity.HIGH, cause)
        rows = [row for row in found.rows if row.cause is cause]
        charged = sum(row.idle_ns for row in rows)
        assert sum(row.idle_ns for row in rows if row.site is not None and row.site.line in lines) >= 0.9 * charged
        assert found.idle_by_cause.get(Cause.UNKNOWN, 0) <= 0.05 * found.window_ns
        assert sum(found.idle_by_cause.values()) == found.idle_ns
    gain = analyse(recording).recoverable[cause] / analyse(recording).window_ns
    assert least <= gain <= most


@pytest.mark.parametrize("name", ["clean_matmuls", "clean_rare_reads"])
def test_clean_steps_raise_no_alarm_with_any_jitter(name):
    recording = read(TRACES / f"h100_{name}.json.gz")
    for each in (recording, *(with_jitter(recording, random.Random(seed)) for seed in range(NUM_JITTERED))):
        assert analyse(each).severity is Severity.HEALTHY


def test_recording_is_read_as_it_was_written(tmp_path):
    host = [(Cause.DATA_WAIT, 5_000, 41), (None, 9_000, 5), (Cause.PYTHON, 7_000, 42)]
    recording = cut(serial_recording(host, [900_000], steps=9, num_cores=3), 4)
    write(recording, tmp_path / "some.json.gz")
    assert read(tmp_path / "some.json.gz") == recording
    assert (len(recording.steps), len(recording.activities), recording.start_ns) == (4, 4, 0)
