"""Every policy on random graphs: safe, between its bounds, the same every time, and right in every order."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.check import LifetimeFault, check_plan, find_lifetime_errors, find_overlaps, find_races
from millstream.graph import Launch, Record, Wait, derive_dependencies, format_plan
from millstream.schedule import (
    POLICIES,
    assign_chains,
    assign_list,
    assign_offsets,
    assign_slack,
    critical_path_ns,
    peak_bytes,
    plan_graph,
    plan_serial,
)
from millstream.simulate import simulate
from millstream.testing import drop_step, execute_graph, execute_plan
from tests.properties.strategies import cases, spread_plans


@given(cases())
def test_plans_are_safe_with_and_without_an_arena(case):
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    check_plan(plan, assign_offsets(plan))
    assert 1 <= plan.num_streams <= num_streams


@given(cases(max_kernels=60))
def test_the_same_arguments_give_the_same_plan_and_timeline(case):
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    assert format_plan(plan_graph(graph, costs, num_streams, policy)) == format_plan(plan)
    assert simulate(plan, costs) == simulate(plan, costs)


@given(cases())
def test_the_makespan_is_between_the_critical_path_and_the_serial_time_with_waits(case):
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    num_waits = sum(isinstance(step, Wait) for step in plan.steps)
    alone, shared = simulate(plan, costs, shared=False), simulate(plan, costs)
    assert critical_path_ns(graph, costs) <= alone.end_ns
    assert max(alone.end_ns, costs.total_ns // plan.num_streams) <= shared.end_ns + 1
    assert shared.end_ns <= costs.total_ns + num_waits * costs.wait_ns + len(graph.kernels)  # rounded up for each
    assert {span.kernel for span in shared.spans} == set(range(len(graph.kernels)))


@given(cases(), st.integers(0, 2000))
def test_kernels_that_must_not_start_at_once_hold_nothing_up_for_longer_than_that(case, start_ns):
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    num_waits = sum(isinstance(step, Wait) for step in plan.steps)
    most = sum(max(cost.duration_ns, start_ns) for cost in costs.kernels) + num_waits * costs.wait_ns
    assert simulate(plan, replace(costs, start_ns=start_ns)).end_ns <= most + len(graph.kernels)  # rounded up for each


@given(cases(), st.sampled_from([assign_list, assign_slack, assign_chains]), st.sampled_from([None, 1, 7, 40]))
def test_assignments_keep_their_promises(case, assign, lookahead):
    """No two kernels overlap on a stream, predecessors are over in time, and the simulator is never behind."""
    graph, costs, num_streams, _ = case
    predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
    durations = [cost.duration_ns for cost in costs.kernels]
    assignment = assign(predecessors, durations, costs.wait_ns, num_streams, lookahead)
    ends = [start + duration for start, duration in zip(assignment.start_ns, durations, strict=True)]
    assert assignment.end_ns == max(ends)
    for kernel, each in enumerate(predecessors):
        for predecessor in each:
            moved = assignment.stream_of[predecessor] != assignment.stream_of[kernel]
            assert ends[predecessor] + (costs.wait_ns if moved else 0) <= assignment.start_ns[kernel]
    on_stream = {}
    for kernel in assignment.launch_order():
        last_end = on_stream.get(assignment.stream_of[kernel], 0)
        assert assignment.start_ns[kernel] >= last_end
        on_stream[assignment.stream_of[kernel]] = ends[kernel]
    if assign is assign_list:
        plan = POLICIES["list"](graph, costs, num_streams, lookahead)
        check_plan(plan)
        assert simulate(plan, costs, shared=False).end_ns <= assignment.end_ns + costs.wait_ns  # the joins


@given(cases(max_kernels=60))
def test_no_wait_is_superfluous(case):
    """Without any of the waits for a predecessor the plan has a race, or work that is not joined."""
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    waited_for = {step.event for step in plan.steps if isinstance(step, Wait)}
    assert waited_for == {step.event for step in plan.steps if isinstance(step, Record)}
    for position, step in enumerate(plan.steps):
        if isinstance(step, Wait):
            broken = drop_step(plan, position)
            faults = {error.fault for error in find_lifetime_errors(broken)}
            assert find_races(broken) or LifetimeFault.MISSING_JOIN in faults


@given(cases(max_kernels=60), st.integers(0, 2**32))
def test_every_order_that_events_allow_gives_the_same_results(case, seed):
    graph, costs, num_streams, policy = case
    plan = plan_graph(graph, costs, num_streams, policy)
    right = execute_graph(graph)
    layout = assign_offsets(plan)
    for _ in range(3):
        rng = random.Random(seed)
        assert execute_plan(plan, rng) == right
        assert execute_plan(plan, rng, layout) == right


@given(spread_plans(), st.integers(0, 2**32))
def test_every_order_of_a_spread_plan_gives_the_same_results(plan, seed):
    assert execute_plan(plan, random.Random(seed)) == execute_graph(plan.graph)


@given(cases(max_kernels=80), st.sampled_from([1.0, 1.2, 2.0]), st.booleans())
def test_plans_keep_within_their_memory_budget(case, factor, packed):
    graph, costs, num_streams, policy = case
    budget = int(factor * peak_bytes(plan_serial(graph)))
    plan = plan_graph(graph, costs, num_streams, policy, memory_bytes=budget, packed=packed)
    assert peak_bytes(plan) <= budget
    check_plan(plan)


@given(cases(max_kernels=80))
def test_launches_on_one_stream_give_the_serial_memory(case):
    graph, costs, _, policy = case
    plan = plan_graph(graph, costs, 1, policy)
    assert [step.kernel for step in plan.steps if isinstance(step, Launch)] == list(range(len(graph.kernels)))
    assert peak_bytes(plan) == peak_bytes(plan_serial(graph))
    layout = assign_offsets(plan)
    assert find_overlaps(plan, layout) == []
    assert peak_bytes(plan, layout=layout) >= layout.arena_bytes
