import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from millstream.check import check_plan, find_overlaps
from millstream.graph import (
    Allocate,
    Free,
    HappensBefore,
    Launch,
    MemoryLayout,
    Role,
    derive_dependencies,
    step_storages,
)
from millstream.schedule import assign_offsets, derive_lifetimes, peak_bytes, plan_serial
from millstream.testing import random_graph
from tests.properties.strategies import graphs, spread_plans


@given(graphs())
def test_serial_plans_are_safe(graph):
    plan = plan_serial(graph)
    check_plan(plan)
    temporaries = {buffer.id for buffer in graph.buffers if buffer.role is Role.TEMPORARY and buffer.alias_of is None}
    written = {graph.storage(name) for kernel in graph.kernels for name in kernel.writes}
    freed = [step.buffer for step in plan.steps if isinstance(step, Free)]
    assert sorted(freed) == sorted(temporaries & written)  # each once: nothing is kept longer than it must be


@given(spread_plans())
def test_spread_plans_are_safe(plan):
    check_plan(plan)


@given(spread_plans())
def test_dependencies_are_ordered_in_a_safe_plan(plan):
    order = HappensBefore(plan)
    launched = {step.kernel: position for position, step in enumerate(plan.steps) if isinstance(step, Launch)}
    for kernel, found in enumerate(derive_dependencies(plan.graph)):
        for dependency in found:
            assert order.before(launched[dependency.kernel], launched[kernel])


@given(spread_plans())
def test_lifetimes_by_brute_force(plan):
    order = HappensBefore(plan)
    uses = {}
    for position, step in enumerate(plan.steps):
        for part in step_storages(plan.graph, step):
            for storage in part:
                uses.setdefault(storage, []).append(position)
    lifetimes = derive_lifetimes(plan)
    planned = (Role.TEMPORARY, Role.OUTPUT)
    assert set(lifetimes) == {storage for storage in uses if plan.graph.buffer_of[storage].role in planned}
    for buffer, lifetime in lifetimes.items():
        assert (lifetime.first, lifetime.last) == (uses[buffer][0], uses[buffer][-1])
        for other in lifetimes.values():
            apart = all(order.before(use, other.first) for use in uses[buffer]) or all(
                order.before(use, lifetime.first) for use in uses[other.buffer]
            )
            assert lifetime.overlaps(other) == (not apart)


@given(spread_plans())
def test_layouts_are_sound(plan):
    """No two buffers share bytes unless one is over before the other begins, told pair by pair; the checker agrees."""
    layout = assign_offsets(plan)
    lifetimes = derive_lifetimes(plan)
    size_of = {buffer.id: buffer.num_bytes for buffer in plan.graph.buffers}
    allocated_inside = {buffer for kernel in plan.graph.kernels for buffer in kernel.allocates}
    packed = list(layout.offset_of)
    assert set(packed) == {
        buffer
        for buffer in lifetimes
        if plan.graph.buffer_of[buffer].role is Role.TEMPORARY and buffer not in allocated_inside
    }
    for index, one in enumerate(packed):
        start, end = layout.offset_of[one], layout.offset_of[one] + size_of[one]
        assert start % 512 == 0
        assert 0 <= start <= end <= layout.arena_bytes
        for other in packed[:index]:
            if lifetimes[one].overlaps(lifetimes[other]):
                assert end <= layout.offset_of[other] or layout.offset_of[other] + size_of[other] <= start
    assert find_overlaps(plan, layout) == []


@given(spread_plans(max_kernels=30), st.integers(0, 2**32), st.sampled_from([0, 1000, 1 << 20]))
def test_unsound_layouts_are_found(plan, seed, spread):
    """With offsets at random there is an overlap exactly where two buffers share bytes and may live together."""
    rng = random.Random(seed)
    offset_of = {buffer: rng.randint(0, spread) for buffer in assign_offsets(plan).offset_of}
    end_of = {buffer: offset + plan.graph.buffer_of[buffer].num_bytes for buffer, offset in offset_of.items()}
    layout = MemoryLayout(offset_of, max(end_of.values(), default=0), "cuda:0")
    lifetimes = derive_lifetimes(plan)
    together = any(
        max(offset_of[one], offset_of[other]) < min(end_of[one], end_of[other])
        and lifetimes[one].overlaps(lifetimes[other])
        for one, other in combinations(offset_of, 2)
    )
    assert bool(find_overlaps(plan, layout)) == together


def align(num_bytes):
    return -(-num_bytes // 512) * 512


def live_and_packed_bytes(graph):
    """The most bytes that live at one time, which no packing can go below, and what the packing takes."""
    plan = plan_serial(graph)
    layout = assign_offsets(plan)
    lifetimes = [lifetime for name, lifetime in derive_lifetimes(plan).items() if name in layout.offset_of]
    live = [
        sum(align(graph.buffer_of[each.buffer].num_bytes) for each in lifetimes if each.first <= position <= each.last)
        for position in range(len(plan.steps))
    ]
    return max(live, default=0), layout.arena_bytes


@given(graphs())
def test_packing_is_between_the_lower_bound_and_twice_that(graph):
    live, packed = live_and_packed_bytes(graph)
    assert live <= packed <= 2 * live


def test_packing_is_within_five_percent_of_the_lower_bound_on_average():
    pairs = [live_and_packed_bytes(random_graph(random.Random(seed), 100)) for seed in range(40)]
    assert sum(packed / live for live, packed in pairs) / len(pairs) < 1.05


@given(spread_plans())
def test_peak_memory_is_what_the_pools_of_all_streams_hold(plan):
    held = {stream: set() for stream in range(plan.num_streams)}
    most = dict.fromkeys(held, 0)
    for step in plan.steps:
        if isinstance(step, Allocate):
            held[step.stream].add(step.buffer)
        elif isinstance(step, Free):
            held[step.stream].remove(step.buffer)
        elif isinstance(step, Launch):
            held[step.stream].update(plan.graph.kernels[step.kernel].allocates)
        for stream, buffers in held.items():
            most[stream] = max(most[stream], sum(plan.graph.buffer_of[buffer].num_bytes for buffer in buffers))
    assert peak_bytes(plan) == sum(most.values())
