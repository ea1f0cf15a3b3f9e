"""Results: files, tables, joined runs."""

import json
from dataclasses import replace

import pytest

from benchmarks.measuring.results import Report, Row, join

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
    for what, other in (("device", "another GPU"), ("commit", "def")):
        with pytest.raises(ValueError, match=what):
            join([report(GRAPH), replace(report(GRAPH), **{what: other})])
