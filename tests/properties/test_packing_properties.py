"""Plans whose memory is packed by expected times, and kernels put off: safe, the same every time, and never worse."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.check import check_plan, find_overlaps
from millstream.errors import PlanError
from millstream.graph import (
    MemoryLayout,
    OwnedRanges,
    Record,
    Role,
    Wait,
    derive_dependencies,
    format_plan,
    parse_plan,
)
from millstream.schedule import assign_chains, assign_list, assign_slack, derive_lifetimes, peak_bytes, plan_graph
from millstream.schedule.delay import delay_kernels, sources
from millstream.testing import drop_step, execute_graph, execute_plan
from tests.properties.strategies import cases


def packed(case):
    graph, costs, num_streams, policy = case
    return plan_graph(graph, costs, num_streams, policy, packed=True)


def aligned(num_bytes):
    return -(-num_bytes // 512) * 512


@given(cases(shortest_ns=0))
def test_packed_plans_are_safe_and_no_larger_than_their_buffers(case):
    plan = packed(case)
    check_plan(plan)
    if plan.num_streams == 1:
        return
    graph, layout = plan.graph, plan.layout
    inside = {buffer for kernel in graph.kernels for buffer in kernel.allocates}
    written = {storage for kernel in graph.kernels for storage in graph.touched_by[kernel.id][1]}
    wanted = {name for name in written - inside if graph.buffer_of[name].role is Role.TEMPORARY}
    if not wanted:
        assert layout is None
        return
    assert set(layout.offset_of) == wanted
    assert all(offset % 512 == 0 for offset in layout.offset_of.values())
    assert layout.arena_bytes <= sum(aligned(graph.buffer_of[name].num_bytes) for name in wanted)
    assert layout.arena_bytes <= peak_bytes(plan)


@given(cases(max_kernels=60, shortest_ns=0), st.integers(0, 2**32))
def test_every_order_of_a_packed_plan_gives_the_same_results(case, seed):
    plan = packed(case)
    right = execute_graph(plan.graph)
    rng = random.Random(seed)
    assert all(execute_plan(plan, rng, plan.layout) == right for _ in range(3))


@given(cases(max_kernels=60, shortest_ns=0))
def test_packed_plans_are_the_same_every_time_and_read_back(case):
    plan = packed(case)
    text = format_plan(plan)
    assert parse_plan(text) == plan
    assert format_plan(parse_plan(text)) == text
    assert format_plan(packed(case)) == text


@given(cases(max_kernels=50, shortest_ns=0))
def test_every_wait_of_a_packed_plan_is_needed_and_missed(case):
    """Memory used again relies on waits: without any one of them the checker finds the fault."""
    plan = packed(case)
    assert {s.event for s in plan.steps if isinstance(s, Wait)} == {
        s.event for s in plan.steps if isinstance(s, Record)
    }
    for position, step in enumerate(plan.steps):
        if isinstance(step, Wait):
            with pytest.raises(PlanError, match="not safe to run"):
                check_plan(drop_step(plan, position))


@given(cases(max_kernels=40, shortest_ns=0), st.data())
def test_shifted_offsets_are_found_as_brute_force_finds_them(case, data):
    plan = packed(case)
    if plan.layout is None:
        return
    lifetimes = derive_lifetimes(plan)
    size_of = {name: plan.graph.buffer_of[name].num_bytes for name in plan.layout.offset_of}
    for _ in range(5):
        name = data.draw(st.sampled_from(sorted(size_of)), label="shifted")
        by = data.draw(st.sampled_from([-512, -1, 1, 512, 65536]), label="by")
        offset_of = {**plan.layout.offset_of, name: plan.layout.offset_of[name] + by}
        layout = MemoryLayout(offset_of, plan.layout.arena_bytes, plan.layout.device)
        if not 0 <= offset_of[name] <= layout.arena_bytes - size_of[name]:
            with pytest.raises(PlanError, match="outside its arena"):
                check_plan(plan, layout)
            continue
        clash = any(
            max(offset_of[one], offset_of[other])
            < min(offset_of[one] + size_of[one], offset_of[other] + size_of[other])
            and lifetimes[one].overlaps(lifetimes[other])
            for one, other in combinations(offset_of, 2)
        )
        assert bool(find_overlaps(plan, layout)) == clash


@given(cases(), st.sampled_from([assign_list, assign_slack, assign_chains]))
def test_kernels_put_off_hold_nothing_up(case, assign):
    """They start later or stay where they are, in time for what needs them; nothing else moves, nothing overlaps."""
    graph, costs, num_streams, _ = case
    predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
    durations = [cost.duration_ns for cost in costs.kernels]
    before = assign(predecessors, durations, costs.wait_ns, num_streams)
    movable = sources(graph)
    after = delay_kernels(before, predecessors, durations, costs.wait_ns, movable)
    assert after.end_ns <= before.end_ns
    assert delay_kernels(before, predecessors, durations, costs.wait_ns, movable) == after
    ends = [start + duration for start, duration in zip(after.start_ns, durations, strict=True)]
    for kernel, each in enumerate(predecessors):
        assert after.start_ns[kernel] >= before.start_ns[kernel]
        assert kernel in movable or after.start_ns[kernel] == before.start_ns[kernel]
        for predecessor in each:
            moved = after.stream_of[predecessor] != after.stream_of[kernel]
            assert ends[predecessor] + (costs.wait_ns if moved else 0) <= after.start_ns[kernel]
    last_end = {}
    for kernel in after.launch_order():
        assert after.start_ns[kernel] >= last_end.get(after.stream_of[kernel], 0)
        last_end[after.stream_of[kernel]] = ends[kernel]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=30))
def test_ranges_know_the_owner_of_every_byte(takings):
    """Against an array with one entry per byte."""
    owners, bytes_ = OwnedRanges(), [None] * 64
    for number, (start, length) in enumerate(takings):
        taken = owners.take(start, start + length, str(number))
        found = {byte: owner for low, high, owner in taken for byte in range(low, high)}
        assert found == {byte: bytes_[byte] for byte in range(start, start + length) if bytes_[byte] is not None}
        assert sum(high - low for low, high, _ in taken) == len(found)
        bytes_[start : start + length] = [str(number)] * length
