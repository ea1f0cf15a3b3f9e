"""A line on a terminal, records elsewhere, and nothing where it is switched off."""

import io
import logging

import pytest

from millstream import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def capture(clock, seconds=42.0):
    with progress.showing("train_step", "captured"):
        progress.phase("tracing")
        for number in range(1, 678):
            clock[0] += seconds / 677
            progress.count("compiling", number, 677, "kernels")


def test_records_one_a_phase(clock, caplog):
    with caplog.at_level(logging.INFO, "millstream"):
        capture(clock)
    expected = ["train_step: tracing", "train_step: compiling 1 of 677 kernels", "train_step: captured in 42 s"]
    assert [record.getMessage() for record in caplog.records] == expected


def test_terminal_shows_one_line_and_leaves_the_last(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    capture(clock)
    shown = progress.sys.stderr.getvalue()
    assert "compiling 214 of 677 kernels" not in shown.split("\r")[1]
    assert any("of 677 kernels" in part for part in shown.split("\r"))
    assert shown.count("\n") == 1
    assert shown.rsplit("\r", 1)[1].endswith("captured in 42 s\n")


def test_short_capture_leaves_nothing(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    capture(clock, seconds=0.1)
    assert "\n" not in progress.sys.stderr.getvalue()


def test_switched_off_says_nothing(clock, caplog, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_PROGRESS", "0")
    with caplog.at_level(logging.INFO, "millstream"):
        capture(clock)
    assert not caplog.records


def test_error_ends_it_and_the_next_one_shows(clock, caplog):
    def fail():
        with progress.showing("train_step", "captured"):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  our own
        fail()
    with caplog.at_level(logging.INFO, "millstream"):
        capture(clock)
    assert len(caplog.records) == 3


def test_inner_part_belongs_to_the_outer(clock, caplog):
    with caplog.at_level(logging.INFO, "millstream"), progress.showing("outer", "captured"):
        clock[0] += 2
        capture(clock)
    assert {record.getMessage().split(":")[0] for record in caplog.records} == {"outer"}


def test_outside_nothing_is_said(caplog):
    with caplog.at_level(logging.INFO, "millstream"):
        progress.phase("tracing")
        progress.count("compiling", 1, 2, "kernels")
    assert not caplog.records
