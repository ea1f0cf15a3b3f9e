"""Results: files, tables, joined runs, and suites that survive their cases."""

import json
from dataclasses import dataclass, replace

import pytest

from benchmarks.results import Report, Row, join
from benchmarks.suite import run_suite

KEYS = {"suite", "date", "device", "torch", "commit", "rows"}
ROW_KEYS = {
    *("case", "variant", "baseline", "baseline_ms", "ours_ms", "ratio", "p20", "p80", "streams", "kernels", "waits"),
    *("peak_bytes", "peak_ratio", "compile_s", "compile_ratio", "bound_ms", "predicted_ms", "equal"),
}


def report(*rows, commit="abc"):
    return Report("inference", "some GPU", commit, "python -m benchmarks.inference", {"torch": "2.11"}, rows=list(rows))


GRAPH = Row("towers", "replay", "inductor graph", 2.0, 1.0, 2.0, 0.9, 1.1, 1, 7, 0, 2**20, 0.5, 3.0, equal=True)
EAGER = Row("towers", "replay", "eager graph", 4.0, 1.0, 4.0, 0.9, 1.1, 1, 7, 0, 2**20, None, 3.0, equal=True)


def test_the_json_has_every_field_and_reads_back():
    data = json.loads(json.dumps(report(GRAPH).to_dict()))
    assert set(data) >= KEYS
    assert set(data["rows"][0]) >= ROW_KEYS
    assert data["rows"][0]["bound_ms"] is None
    assert Report.from_dict(data) == report(GRAPH)


def test_the_table_has_a_line_per_case_and_a_column_per_baseline():
    table = report(GRAPH, EAGER, Row("lstm", note="not run: it broke")).to_markdown().splitlines()
    head, _, towers, lstm = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("|")]
    assert head[:5] == ["case", "variant", "ours", "inductor graph", "eager graph"]
    assert towers[:5] == ["towers", "replay", "1 (0.9 to 1.1)", "2 (2.00×)", "4 (4.00×)"]
    assert "1.0 (0.50× inductor graph)" in towers
    assert (lstm[0], lstm[2], lstm[-1]) == ("lstm", "not run", "not run: it broke")


def test_joined_runs_keep_the_latest_measured_case():
    newer = replace(GRAPH, ours_ms=0.5)
    failed = Row("towers", note="not run: no time left")
    other = Row("lstm", ours_ms=3.0)
    assert join([report(GRAPH), report(newer, other)]).rows == [newer, other]
    assert join([report(GRAPH), report(failed)]).rows == [GRAPH]
    assert join([report(failed), report(GRAPH)]).rows == [GRAPH]
    with pytest.raises(ValueError, match="commit"):
        join([report(GRAPH), report(GRAPH, commit="def")])


@dataclass(frozen=True)
class Case:
    name: str
    estimate_s: float = 1.0


def run(tmp_path, cases, *arguments, **work):
    def run_case(case, settings):
        return work[case.name]()

    code = run_suite("cpu", cases, run_case, device="cpu", argv=["--out", str(tmp_path), *arguments])
    return code, json.loads((tmp_path / "cpu.json").read_text())["rows"]


def test_an_error_ends_its_case_only(tmp_path, capsys):
    def fail():
        raise RuntimeError("it broke\nbadly")

    code, rows = run(tmp_path, [Case("a"), Case("b")], a=fail, b=lambda: [Row("b", ours_ms=1.0)])
    assert code == 1
    assert [(row["case"], row["note"]) for row in rows] == [("a", "not run: RuntimeError: it broke"), ("b", None)]
    assert "badly" in capsys.readouterr().err


def test_what_does_not_fit_the_budget_is_recorded(tmp_path, capsys):
    cases = [Case("a", 1e6), Case("b", 0.0)]
    code, rows = run(tmp_path, cases, "--budget-seconds", "1000", b=lambda: [Row("b", ours_ms=1.0)])
    assert code == 0
    assert rows[0]["note"].startswith("not run: 0 of 1000 s were spent")
    assert rows[1]["ours_ms"] == 1.0


def test_an_unknown_case_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, [Case("a")], "--cases", "b")
    assert "unknown cases: b" in capsys.readouterr().err
