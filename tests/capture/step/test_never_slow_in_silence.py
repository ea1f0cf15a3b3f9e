"""What a step does again and again is told, and what it cannot do is not tried for ever."""

import logging

import pytest
import torch

import millstream as ms
from millstream.capture import Step
from millstream.capture.step import calls
from millstream.capture.step.capturing import retracing
from millstream.errors import FallbackWarning
from tests.capture.worlds import interpret


def captured(function, **options):
    return Step(function, build=interpret, **options)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, "millstream")
    return caplog


def test_second_capture_in_a_row_for_one_reason_is_told_once(told):
    x = torch.ones(2, 3)

    @captured
    def step(x, name, batch):
        return x.sum() + len(name) + len(batch["ids"][0])

    for name in ("a", "ab"):
        step(x, name, {"ids": ("k",)})
    assert not told.messages
    step(x, "abc", {"ids": ("k",)})
    (line,) = told.messages
    assert "name is 'abc', was 'ab'" in line
    step(x, "abcd", {"ids": ("k",)})
    step(x, "abcd", {"ids": ("kk",)})
    step(x, "abcd", {"ids": ("kkk",)})
    assert len(told.messages) == 2
    assert "batch['ids'][0] is 'kkk', was 'kk'" in told.messages[1]
    causes = [line.partition(": ")[2] for line in step.history]
    assert causes == [
        "the first call that could be captured",
        "name is 'ab', was 'a'",
        "name is 'abc', was 'ab'",
        "name is 'abcd', was 'abc'",
        "batch['ids'][0] is 'kk', was 'k'",
        "batch['ids'][0] is 'kkk', was 'kk'",
    ]


def test_cause_is_named_whatever_differs():
    kept = {"mode": "a", "scale": torch.ones(3)}
    x = torch.ones(4, 3)

    @captured
    def step(x, y=None, n=0):
        return (x * kept["scale"]).sum() + len(kept["mode"]) + (0 if y is None else y.sum()) + (1 if n > 2 else 0)

    def cause(*args, **kwargs):
        before = len(step.history)
        step(*args, **kwargs)
        return step.history[-1].partition(": ")[2] if len(step.history) > before else None

    assert cause(x) == "the first call that could be captured"
    assert cause(x) is None
    kept["mode"] = "bc"
    assert cause(x).endswith("is 'bc', was 'a'")
    assert cause(x, n=3) is not None
    kept["scale"] = torch.zeros(3)
    assert "another tensor, float32[3]" in cause(x)
    assert cause(x.double()) == "dtype of x is torch.float64, was torch.float32"
    assert cause(x.double(), x) == "y was not there, or at another place"
    assert cause(x.double().t().contiguous().t(), x).startswith("strides of x is")
    assert cause(x) is None
    with torch.no_grad():
        assert "other modes" in cause(x)
    assert cause(torch.ones(2, 3)) == "x is float32[2, 3], was float32[4, 3]"


def test_sizes_that_become_symbols_are_not_told_of(told):
    @captured
    def step(x, y):
        return x.sum() / x.shape[0] + y.sum()

    for rows, columns in ((16, 4), (16, 4), (5, 4), (12, 7), (9, 3), (1, 3)):
        step(torch.ones(rows, 2), torch.ones(columns))
    assert not told.messages
    assert "x is float32[5, 2], was float32[16, 2]" in step.history[1]


def test_explanation_lists_captures():
    step = ms.step(lambda x, name: x.sum() + len(name), engine="serial")
    for name in ("a", "b"):
        step(torch.ones(2), name)
    text = ms.explain(step).text()
    assert "captures:\n  1. <lambda>" in text
    assert "name is 'b', was 'a'" in text
    assert ms.explain(step).to_dict()["captures"] == step.history


@pytest.fixture
def traces(monkeypatch):
    """A list that grows by one for each trace."""
    made = []
    trace = retracing.trace_step
    monkeypatch.setattr(retracing, "trace_step", lambda request: (made.append(1), trace(request))[1])
    return made


def branching(x, name=""):
    total = x.sum()
    if len(x) > 4:
        return [total, -total][total.item() > 3]
    return total + len(name)


def run(step, *calls):
    for call in calls:
        assert torch.equal(step(*call), branching(*call))


def test_sizes_that_fall_back_for_one_reason_are_not_tried_any_more(traces):
    step = captured(branching)
    with pytest.warns(FallbackWarning, match="indexes with a tensor's value") as warned:
        run(step, *((torch.ones(rows, 3),) for rows in range(5, 10)))
    assert len(warned) == 1
    num_traces = len(traces)
    run(step, *((torch.ones(rows, 3),) for rows in range(10, 20)))
    assert len(traces) == num_traces
    run(step, (torch.ones(3, 3).double(),))  # what differs in more is
    assert len(step.graphs) == 1
    step.reset()
    run(step, (torch.ones(4, 3),))
    assert len(step.graphs) == 1


def test_sizes_that_are_captured_go_on_being_so(traces):
    step = captured(branching)
    with pytest.warns(FallbackWarning, match="indexes with a tensor's value"):
        run(step, *((torch.ones(rows, 3),) for rows in (3, 5, 6, 4, 3)))
    num_traces = len(traces)
    run(step, *((torch.ones(rows, 3),) for rows in (3, 4)))
    assert len(traces) == num_traces
    assert step.graphs


def test_calls_that_differ_in_more_are_tried_a_few_times(traces):
    step = captured(branching)
    with pytest.warns(FallbackWarning, match="indexes with a tensor's value"):
        run(step, *((torch.ones(5, 3), "a" * length) for length in range(4)))
    num_traces = len(traces)
    run(step, *((torch.ones(5, 3), "b" * length) for length in range(1, 9)))
    assert len(traces) == num_traces


def test_edited_function_is_tried_again():
    def function(x):
        return [x.sum(), -x.sum()][x.sum().item() > 3]

    def edited(x):
        return x.sum() * 2

    step = captured(function)
    with pytest.warns(FallbackWarning, match="indexes with a tensor's value"):
        for rows in (2, 3, 4):
            step(torch.ones(rows, 3))
    function.__code__ = edited.__code__
    assert step(torch.ones(5, 3)) == 30
    assert len(step.graphs) == 1
    assert not step.fallbacks


def test_results_of_plain_calls_are_not_searched_for_ever(monkeypatch):
    searches = []
    search = calls.discover
    monkeypatch.setattr(calls, "discover", lambda *args: searches.append(1) or search(*args))
    kept = torch.ones(2, 3)
    view = kept[:1]

    @captured
    def step(x):
        made = torch.zeros(4).view(2, 2)
        return x[x > 0].sum(), made, view  # a view of what the step has made, and one that is kept outside of it

    with pytest.warns(FallbackWarning, match="depends on values"):
        for _ in range(8):
            _, made, own = step(torch.ones(3))
            assert own is view
            assert made.shape == (2, 2)
    num_searches = len(searches)
    for _ in range(8):
        assert step(torch.ones(3))[2] is view
    assert len(searches) == num_searches
