"""The list of what makes the host wait: exact counts at the right lines, and nothing left behind."""

import runpy
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import millstream as ms
from millstream.insight.syncs import SyncKind
from millstream.trace import SyncTrace

SCRIPT = Path(__file__).parents[1] / "insight" / "scripts" / "reads.py"


def test_every_read_is_counted_at_its_line():
    with ms.trace_syncs() as trace:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    planted = {number: text for number, text in enumerate(lines, 1) if "# 5 " in text}
    found = {row.site.line: row for row in trace.findings.rows}
    assert found.keys() == planted.keys()
    assert all(row.count == 5 for row in found.values())
    for number, text in planted.items():
        assert str(found[number].kind).startswith(text.rpartition("# 5 ")[2][:4])
    assert trace.findings.num_steps == 5
    assert "losses.append(loss.item())" in str(trace)
    assert sum(row["count"] for row in trace.to_dict()["rows"]) == 25


def test_line_is_the_users_where_a_library_reads():
    weights = [torch.randn(3, requires_grad=True)]
    weights[0].sum().backward()
    with ms.trace_syncs() as trace:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
    assert trace.findings.rows
    row = trace.findings.rows[0]
    assert row.site.file == __file__
    assert row.inside.file.endswith("clip_grad.py")


def test_value_on_its_way_to_numpy_is_read_once_and_comparisons_read():
    x = torch.arange(3.0)
    with ms.trace_syncs() as trace:
        x.cpu().numpy()
        assert torch.allclose(x, x)
    assert [(row.kind, row.count) for row in trace.findings.rows] == [(SyncKind.READ, 1), (SyncKind.TO_LIST, 1)]


def _read():
    assert torch.ones(3).sum().item() == 3


class _Reader(threading.Thread):
    def run(self):
        _read()


def _start(thread):
    thread.start()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()
    thread.join()
    return thread


def _start_with_own_run():
    thread = threading.Thread()
    thread.run = _read
    assert _start(thread).run is _read


def _submit():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(_read).result()


STARTS = {
    "pool": _submit,
    "target": lambda: _start(threading.Thread(target=_read)),
    "subclass": lambda: _start(_Reader()),
    "timer": lambda: _start(threading.Timer(0, _read)),
    "own run": _start_with_own_run,
}


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_threads_are_followed_on_request(start, follows):
    before = vars(threading.Thread).copy()
    trace = SyncTrace(follows_threads=follows)
    with trace:
        start()
    assert vars(threading.Thread) == before
    assert sum(row.count for row in trace.findings.rows) == follows


def test_followed_thread_is_left_as_it_was():
    thread = _Reader()
    before = vars(thread).keys()
    with SyncTrace(follows_threads=True):
        _start(thread)
    assert vars(thread).keys() == before


def test_trace_leaves_methods_and_results_as_they_were():
    before = vars(torch.Tensor).copy()
    plain = torch.arange(6.0).reshape(2, 3)
    with ms.trace_syncs() as trace:
        inside = plain.tolist(), plain.cpu(), plain.sum().item()
    assert inside[0] == plain.tolist()
    assert inside[1] is plain
    assert inside[2] == 15.0
    assert vars(torch.Tensor) == before
    assert Counter(row.kind for row in trace.findings.rows)[SyncKind.READ] == 1


def test_graph_break_is_listed_with_its_reason():
    def forward(x):
        x = x + 1
        print(end="")  # noqa: T201
        return x * 2

    torch._dynamo.reset()
    with ms.trace_syncs() as trace:
        torch.compile(forward, backend="eager")(torch.ones(2))
    rows = [row for row in trace.findings.rows if row.kind is SyncKind.GRAPH_BREAK]
    assert len(rows) == 1
    assert "print" in rows[0].detail
    assert rows[0].site.file == __file__
