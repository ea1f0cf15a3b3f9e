"""Where the time of a run went, in numbers and words."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from millstream.errors import ArgumentError
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Launch, Plan, Record, Role, Span, Timeline, Wait
from millstream.report import Account
from millstream.schedule import critical_path_ns, plan_serial
from millstream.simulate import simulate
from millstream.testing import chain_graph, towers_graph
from tests.report.samples import EMPTY, costs_of, report_of, runs

TOWERS = towers_graph(2, 2)  # kernels 0, 1 and 2, 3
SIDE_BY_SIDE = Plan(TOWERS, (Launch(0, 0), Launch(2, 1), Launch(1, 0), Launch(3, 1), Record(0, 1), Wait(0, 0)), 2)


def account_of(plan, costs):
    return Account(plan.graph, simulate(plan, costs), costs)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_numbers_fit_together(run):
    plan, costs, timeline = run
    for account in (Account(plan.graph, timeline, costs), Account(plan.graph, timeline)):
        path = account.critical_path
        assert list(path) == sorted(set(path))
        assert account.critical_path_ns <= account.serial_ns
        assert account.alone_ns + account.idle_ns <= timeline.end_ns
        assert max(account.busy_ns) <= timeline.end_ns
        assert sum(gap for gap, _ in account.gaps) == account.idle_ns == timeline.idle_ns
        assert account.bound()
    assert Account(plan.graph, timeline, costs).critical_path_ns == critical_path_ns(plan.graph, costs)
    predicted = account_of(plan, costs)
    assert predicted.bound_ns <= predicted.timeline.end_ns + 1  # roofline times are rounded


def test_kernels_that_took_no_time_are_no_chain():
    graph = chain_graph(1)
    run = Timeline((Span(graph.kernels[0].name, 0, 0, 0, kernel=0), Span("memset", 0, 0, 0)), 1, 81)
    assert Account(graph, run).bound().startswith("one stream runs one kernel after another")


def test_hand_made_run():
    account = account_of(SIDE_BY_SIDE, costs_of(5, 6, 7, 8, wait_ns=3, shares=(0.5, 0.25)))
    assert account.critical_path == (2, 3)
    assert (account.serial_ns, account.critical_path_ns, account.roofline_ns) == (26, 15, 13)
    assert (account.timeline.end_ns, account.busy_ns, account.idle_ns, account.alone_ns) == (18, (11, 15), 3, 4)
    assert account.gaps == ((3, None),)


def test_times_come_from_the_timeline_when_nobody_knows_the_costs():
    spans = (Span("tower0_0", 0, 0, 4, 0), Span("again", 0, 5, 7, 0), Span("?", 0, 7, 9), Span("tower0_1", 0, 9, 10, 1))
    account = Account(TOWERS, Timeline(spans, 1, 12))
    assert account.durations_ns == (6, 1, 0, 0)
    assert (account.critical_path, account.roofline_ns, account.idle_ns) == ((0, 1), None, 3)


@pytest.mark.parametrize(
    ("plan", "costs", "words"),
    [
        (plan_serial(EMPTY), costs_of(), "nothing runs"),
        (plan_serial(TOWERS), costs_of(5, 5, 5, 5), "up to 2.0 times as quick"),
        (plan_serial(TOWERS), costs_of(5, 5, 5, 5, shares=(0.2, 1.0)), "its memory is busy 100 % of the time"),
        (plan_serial(TOWERS), costs_of(5, 5, 5, 5, shares=(0.9, 0.2)), "its arithmetic is busy 90 % of the time"),
        (plan_serial(chain_graph(3)), costs_of(5, 7, 5), "one chain of 3 kernels, .* 17 ns .* 7 ns: kernel 1 "),
        (plan_serial(chain_graph(3)), costs_of(5, 7, 5), "more streams gain nothing, a shorter chain"),
        (
            plan_serial(chain_graph(1)),
            costs_of(5),
            "^one kernel, which takes 5 ns .* shorter kernel would; kernel 0 ",
        ),
        (plan_serial(TOWERS), costs_of(47, 47, 3, 3), "more streams gain at most 6 %, a shorter chain"),
        (SIDE_BY_SIDE, costs_of(50, 50, 20, 20), "60 % of the time all other streams wait for one chain of 2 kernels"),
        (
            SIDE_BY_SIDE,
            costs_of(5, 6, 7, 8, wait_ns=30),
            "15 ns instead of 45 ns.*67 % of the time nothing runs, in 1 gap",
        ),
        (
            SIDE_BY_SIDE,
            costs_of(9, 9, 9, 9, wait_ns=30, shares=(0.8, 0)),
            "would allow 29 ns .* 1.67 times as long as alone",
        ),
    ],
)
def test_words(plan, costs, words):
    text = account_of(plan, costs).bound()
    assert re.search(words, text), text


def test_the_kernel_behind_the_longest_gap_is_named():
    spans = (Span("tower0_0", 0, 0, 4, 0), Span("tower0_1", 0, 5, 7, 1), Span("tower1_0", 0, 20, 22, 2))
    assert (
        "the longest, 13 ns, is before kernel 2 'tower1_0' (shape.py:3"
        in Account(TOWERS, Timeline(spans, 1, 22)).bound()
    )


def test_data_of_another_graph_is_refused():
    with pytest.raises(ArgumentError, match="costs of 3 kernels, graph '2 towers of 2' has 4"):
        Account(TOWERS, Timeline((), 1, 0), costs_of(1, 2, 3))
    with pytest.raises(ArgumentError, match="has kernel 4, graph '2 towers of 2' only 4"):
        Account(TOWERS, Timeline((Span("x", 0, 0, 1, 4),), 1, 1))


def weights_graph(user=KernelKind.FUSED):
    """Two weights, of which one is cast and laid out again for ``user``, and the other changed by its reader."""
    buffers = [
        *(Buffer(name, 64, "cuda:0", Role.STATE) for name in ("w", "v")),
        Buffer("x", 64, "cuda:0", Role.INPUT),
        *(Buffer(name, 64, "cuda:0", Role.TEMPORARY) for name in ("cast", "laid", "noise")),
        Buffer("y", 64, "cuda:0", Role.OUTPUT),
    ]
    accesses = [
        (("w",), ("cast",)),
        (("cast",), ("laid",)),
        (("v",), ("v",)),
        ((), ("noise",)),
        (("x", "laid"), ("y",)),
    ]
    kinds = [KernelKind.FUSED] * 4 + [user]
    kernels = tuple(
        Kernel(i, f"k{i}", kind, "cuda:0", *touched)
        for i, (kind, touched) in enumerate(zip(kinds, accesses, strict=True))
    )
    return KernelGraph("weights", kernels, tuple(buffers), ("w", "v", "x"), ("y",))


@pytest.mark.parametrize(("used_ns", "words"), [(10_000, "2 kernels, 18 % of the time"), (60_000, "")])
def test_what_parameters_cost_that_are_prepared_in_every_run(used_ns, words):
    graph = weights_graph()
    costs = costs_of(1000, 2000, 1500, 2000, used_ns)
    account = Account(graph, simulate(plan_serial(graph), costs), costs)
    assert account.preparing == (0, 1)
    assert account.preparing_ns == 3000
    assert account.preparation().startswith(words)
    assert bool(account.preparation()) is bool(words)
    text = "\n".join(report_of(plan_serial(graph), costs=costs).text(0))
    assert ("freeze=True does it once" in text) is bool(words)
    step = replace(report_of(plan_serial(graph), costs=costs), phase="step")
    assert "freeze" not in "\n".join(step.text(0)), "its parameters change"


@pytest.mark.parametrize("user", [KernelKind.FUSED, KernelKind.CONV])
def test_the_layout_that_convolutions_need_is_named(user):
    plan = plan_serial(weights_graph(user))
    text = "\n".join(report_of(plan, costs=costs_of(1000, 2000, 1500, 2000, 10_000)).text(0))
    assert ("channels_last" in text) is (user is KernelKind.CONV)
