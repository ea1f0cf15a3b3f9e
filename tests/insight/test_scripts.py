"""Scripts with a planted cause, run on the CPU: the right diagnosis and line, and none for their fixed twins."""

import gc
import runpy
import sys
from pathlib import Path

import pytest

import millstream as ms
from millstream.insight import Cause, Severity

SCRIPTS = Path(__file__).parent / "scripts"
PLANTED = [
    ("workers_too_slow", Cause.DATA_WAIT, "# waits"),
    ("in_process_loader", Cause.IN_PROCESS, "# slow"),
    ("python_loop", Cause.PYTHON, "# slow"),
    ("recompiles", Cause.COMPILE, "compiled("),
    ("checkpoints", Cause.IO, "torch.save("),
    ("collector", Cause.GC, "# slow"),
]


@pytest.fixture(autouse=True)
def _small_heap():
    """What the test runner holds is not collected in the scripts' time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def profile(name, monkeypatch, *arguments):
    script = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "cpu", *arguments])
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # it reads the arguments
    with ms.profile() as run:
        runpy.run_path(script, run_name="__main__")
    return run.findings


def line_of(site):
    return Path(site.file).read_text(encoding="utf-8").splitlines()[site.line - 1]


@pytest.mark.parametrize(("name", "cause", "text"), PLANTED)
def test_planted_cause_is_the_diagnosis_and_gone_from_the_twin(name, cause, text, monkeypatch):
    found = profile(name, monkeypatch)
    assert found.severity is Severity.HIGH
    # That other processes leave no processor free is true, too, and no fault of the script's.
    leading = next(row for row in found.rows if row.cause is not Cause.DESCHEDULED)
    assert leading.cause is cause
    assert text in line_of(leading.site)
    assert Path(leading.site.file).stem == name
    assert sum(found.idle_by_cause.values()) == found.idle_ns
    twin = profile(name, monkeypatch, "fixed")
    spent = [each.idle_by_cause.get(cause, 0) / len(each.steps) for each in (found, twin)]
    assert spent[1] < spent[0] / 2


def test_thread_that_holds_the_interpreter_is_named(monkeypatch):
    found = profile("busy_thread", monkeypatch)
    rows = [row for row in found.rows if row.cause is Cause.GIL]
    assert rows
    file, _, line = max(rows, key=lambda row: row.idle_ns).detail.rpartition(":")
    body = Path(file).read_text(encoding="utf-8").splitlines()
    begin = body.index("    while not stopped.is_set():")
    assert body[int(line) - 1] in body[begin : begin + 4]


def test_workers_that_are_needed_follow_from_their_times(monkeypatch):
    found = profile("workers_too_slow", monkeypatch)
    assert found.loader.num_workers == 1
    assert found.loader.batch_ns >= 4 * 5_000_000  # of four items that sleep 5 ms each
    assert abs(found.workers_needed - found.loader.batch_ns / found.free_step_ns) <= 1


def test_recompilations_are_counted_with_their_guard(monkeypatch):
    found = profile("recompiles", monkeypatch)
    guards = [note for note in found.notes if note.cause is Cause.COMPILE]
    assert len(guards) == 5  # of six lengths, the first is compiled and not compiled again
    assert all("size mismatch" in note.text and note.site.function == "forward" for note in guards)


def test_graph_break_is_told_with_its_line(monkeypatch, capsys):
    found = profile("recompiles", monkeypatch, "break")
    breaks = [note for note in found.notes if note.cause is Cause.GRAPH_BREAK]
    assert [line_of(note.site).strip() for note in breaks] == ['print("shape", tuple(x.shape))  # breaks the graph']
    assert capsys.readouterr().err == ""  # what Dynamo logs for us is not printed
