import random

import pytest

from millstream.cost import Costs, KernelCost
from millstream.errors import ArgumentError, PlanError
from millstream.graph import Free, Launch, MemoryLayout, Plan, Record, Span, Timeline, Wait, parse_graph
from millstream.schedule import plan_serial
from millstream.simulate import simulate
from millstream.testing import chain_graph, drop_step, execute_graph, execute_plan, move_step, towers_graph

GRAPH = towers_graph(2, 2)  # kernels 0, 1 and 2, 3


def costs_of(*durations, wait_ns=0, shares=(0.0, 0.0)):
    return Costs(tuple(KernelCost(duration, *shares) for duration in durations), wait_ns)


def spans_of(timeline):
    return {span.kernel: (span.stream, span.start_ns, span.end_ns) for span in timeline.spans}


def test_one_stream_runs_one_after_another():
    timeline = simulate(plan_serial(GRAPH), costs_of(5, 6, 7, 8, shares=(1.0, 1.0)))
    assert spans_of(timeline) == {0: (0, 0, 5), 1: (0, 5, 11), 2: (0, 11, 18), 3: (0, 18, 26)}
    assert (timeline.end_ns, timeline.idle_ns, timeline.busy_ns(0)) == (26, 0, 26)


TWO_STREAMS = Plan(GRAPH, (Launch(0, 0), Launch(2, 1), Launch(1, 0), Launch(3, 1), Record(0, 1), Wait(0, 0)), 2)


def test_streams_run_side_by_side_and_are_joined_by_a_wait():
    timeline = simulate(TWO_STREAMS, costs_of(5, 6, 7, 8, wait_ns=3))
    assert spans_of(timeline) == {0: (0, 0, 5), 1: (0, 5, 11), 2: (1, 0, 7), 3: (1, 7, 15)}
    assert timeline.end_ns == 15 + 3
    assert timeline.idle_ns == 3
    assert [span.name for span in timeline.spans] == ["tower0_0", "tower1_0", "tower0_1", "tower1_1"]


def test_a_wait_for_what_is_long_past_costs_nothing():
    steps = (Launch(0, 0), Record(0, 0), Launch(2, 1), Wait(0, 1), Launch(1, 1), Launch(3, 1), Record(1, 1), Wait(1, 0))
    timeline = simulate(Plan(GRAPH, steps, 2), costs_of(5, 1, 10, 1, wait_ns=3))
    assert spans_of(timeline)[1] == (1, 10, 11)
    late = simulate(Plan(GRAPH, steps, 2), costs_of(9, 1, 10, 1, wait_ns=3))
    assert spans_of(late)[1] == (1, 12, 13)


def test_a_wait_for_its_own_stream_costs_nothing():
    steps = (Launch(0, 0), Record(0, 0), Wait(0, 0), *(Launch(kernel, 0) for kernel in (1, 2, 3)))
    assert simulate(Plan(GRAPH, steps), costs_of(1, 1, 1, 1, wait_ns=100)).end_ns == 4


def test_a_full_device_is_no_faster_on_two_streams():
    timeline = simulate(TWO_STREAMS, costs_of(10, 10, 10, 10, shares=(1.0, 0.0)))
    assert timeline.end_ns == 40
    assert spans_of(timeline) == {0: (0, 0, 20), 2: (1, 0, 20), 1: (0, 20, 40), 3: (1, 20, 40)}
    assert simulate(TWO_STREAMS, costs_of(10, 10, 10, 10, shares=(1.0, 0.0)), shared=False).end_ns == 20


def test_kernels_that_need_different_things_run_well_together():
    compute, memory = KernelCost(10, 1.0, 0.0), KernelCost(10, 0.0, 1.0)
    assert simulate(TWO_STREAMS, Costs((compute, compute, memory, memory))).end_ns == 20
    part = KernelCost(10, 0.75, 0.0)
    assert simulate(TWO_STREAMS, Costs((part,) * 4)).end_ns == 30  # one and a half times too much


def test_neighbours_cost_each_other_time_also_where_there_is_room():
    def ends(crowding, share=0.1):
        return simulate(TWO_STREAMS, Costs((KernelCost(1000, share, share),) * 4, crowding=crowding)).end_ns

    assert [ends(0.0), ends(0.07), ends(0.5)] == [2000, 2140, 3000]
    assert [ends(0.07, share=0.75), ends(0.5, share=0.75)] == [3210, 4000]  # 4000: one after another
    alone = simulate(plan_serial(GRAPH), Costs((KernelCost(1000),) * 4, crowding=0.07))
    assert alone.end_ns == 4000


def test_a_kernel_speeds_up_when_the_device_has_room_again():
    long, short = KernelCost(20, 1.0, 0.0), KernelCost(5, 1.0, 0.0)
    timeline = simulate(TWO_STREAMS, Costs((long, KernelCost(0), short, KernelCost(0))))
    assert spans_of(timeline)[2] == (1, 0, 10)
    assert spans_of(timeline)[0] == (0, 0, 25)


def test_the_host_issues_one_launch_after_another():
    timeline = simulate(plan_serial(GRAPH), costs_of(1, 1, 50, 1), issue_ns=10)
    assert [span.start_ns for span in timeline.spans] == [10, 20, 30, 80]


def test_an_empty_plan_takes_no_time():
    assert simulate(Plan(chain_graph(0), ()), Costs(())) == Timeline((), 1, 0)


def test_costs_of_another_graph_are_refused():
    with pytest.raises(ArgumentError, match="the costs are those of 3 kernels, graph '2 towers of 2' has 4"):
        simulate(plan_serial(GRAPH), costs_of(1, 2, 3))


def test_waiting_for_ever_is_an_error():
    with pytest.raises(PlanError, match="wait for event 7 never ends"):
        simulate(Plan(GRAPH, (Wait(7, 1),), 2), costs_of(1, 2, 3, 4))
    with pytest.raises(PlanError, match="no stream of plan 'serial' can go on"):
        execute_plan(Plan(GRAPH, (Wait(7, 0),), 2), random.Random(0))


def test_idle_time_counts_gaps_and_not_overlaps():
    spans = (Span("a", 0, 0, 10), Span("b", 1, 5, 7), Span("c", 1, 8, 12), Span("d", 0, 20, 30))
    timeline = Timeline(spans, 2, 33)
    assert timeline.idle_ns == 8 + 3
    assert (timeline.busy_ns(0), timeline.busy_ns(1)) == (20, 6)


SHARED = parse_graph("""
graph shared
inputs   (x, s)
outputs  (y)
buffers
  x  input      cuda:0  64
  s  state      cuda:0  64
  t  temporary  cuda:0  512
  v  temporary  cuda:0  512  view of t
  u  temporary  cuda:0  512
  y  output     cuda:0  64
kernels
  0  fused  a  cuda:0  (x) -> (t)
  1  fused  b  cuda:0  (v, s) -> (u, s)
  2  fused  c  cuda:0  (u, v, s) -> (y)
""")


def test_values_depend_on_everything_that_goes_into_them():
    results = execute_graph(SHARED)
    assert set(results) == {"x", "s", "y"}
    assert execute_graph(SHARED) == results
    assert execute_plan(plan_serial(SHARED), random.Random(0)) == results


def test_a_missing_wait_gives_another_result_in_some_order():
    steps = (Launch(0, 0), Record(0, 0), Wait(0, 1), Launch(1, 1), Record(1, 1), Wait(1, 0), Launch(2, 0))
    plan = Plan(SHARED, steps, 2)
    right = execute_graph(SHARED)
    seeds = [random.Random(seed) for seed in range(50)]
    assert all(execute_plan(plan, rng) == right for rng in seeds)
    for position in (2, 5):
        assert any(execute_plan(drop_step(plan, position), rng) != right for rng in seeds)


def test_memory_that_is_shared_too_early_gives_another_result():
    plan, right = plan_serial(SHARED), execute_graph(SHARED)
    assert execute_plan(plan, random.Random(0), MemoryLayout({"t": 0, "u": 512}, 1024, "cuda:0")) == right
    assert execute_plan(plan, random.Random(0), MemoryLayout({"t": 0, "u": 511}, 1024, "cuda:0")) != right
    early = move_step(plan, plan.steps.index(Free("t", 0)), plan.steps.index(Launch(0, 0)) + 1)
    assert execute_plan(early, random.Random(0)) != right


def test_a_write_through_a_view_depends_on_what_was_there():
    partly = parse_graph("""
graph partly
inputs   ()
outputs  (y)
buffers
  t  temporary  cuda:0  512
  v  temporary  cuda:0  256  view of t
  y  output     cuda:0  64
kernels
  0  fused  all   cuda:0  () -> (t)
  1  fused  half  cuda:0  () -> (v)
  2  fused  read  cuda:0  (t) -> (y)
""")
    late = Plan(partly, (Launch(1, 0), Launch(2, 0), Launch(0, 0)))
    assert execute_plan(late, random.Random(0)) != execute_graph(partly)
