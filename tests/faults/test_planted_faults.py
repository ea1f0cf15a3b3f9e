"""The checker is tried on broken plans: whatever brute force finds it must find, and nothing else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.check import LifetimeFault, check_plan, find_lifetime_errors, find_races
from millstream.errors import PlanError
from millstream.graph import Allocate, Free, HappensBefore, Launch, Record, Wait, validate_plan
from millstream.testing import drop_step, move_step, random_graph, restream_step, spread_plan, swap_steps
from tests.faults.oracle import Oracle


def make_plan(seed, num_kernels, num_streams):
    rng = random.Random(seed)
    return spread_plan(random_graph(rng, num_kernels, parts=rng.choice((0.0, 0.4))), num_streams, rng)


def found_by_checker(plan):
    races = {(race.buffer, race.first.step, race.second.step) for race in find_races(plan)}
    errors = set()
    for error in find_lifetime_errors(plan):
        if error.fault is LifetimeFault.MISSING_JOIN:
            errors.add((None, error.fault, (error.first.stream,)))
        else:
            steps = {access.step for access in (error.first, error.second) if access}
            errors.add((error.buffer, error.fault, tuple(sorted(steps))))
    return races, errors


def assert_agrees(plan):
    """Compare checker and brute force; return whether the plan is safe."""
    oracle = Oracle(plan)
    races, errors = found_by_checker(plan)
    assert races == oracle.races()
    assert errors == oracle.lifetime_errors()
    if races or errors:
        with pytest.raises(PlanError, match="not safe to run"):
            check_plan(plan)
    else:
        check_plan(plan)
    return not races and not errors


def is_valid(plan):
    try:
        validate_plan(plan)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("num_streams", [2, 3, 8])
def test_every_dropped_step(num_streams):
    faults = 0
    for seed in range(4):
        plan = make_plan(seed, 25, num_streams)
        assert assert_agrees(plan)
        for position, step in enumerate(plan.steps):
            broken = drop_step(plan, position)
            waited_for = isinstance(step, Record) and Wait(step.event, 0) in plan.steps
            if isinstance(step, Launch) or waited_for:
                assert not is_valid(broken)
            elif is_valid(broken):
                safe = assert_agrees(broken)
                faults += not safe
                assert not (safe and isinstance(step, Allocate))
    assert faults > 40  # the waits that matter, and every allocation


def test_every_swap_of_neighbours():
    faults = 0
    for seed in range(4):
        plan = make_plan(seed, 20, 3)
        for position in range(len(plan.steps) - 1):
            broken = swap_steps(plan, position, position + 1)
            if is_valid(broken):
                faults += not assert_agrees(broken)
    assert faults > 20


def test_every_free_issued_early():
    """An early free is found wherever it stands before the last use."""
    plan = make_plan(5, 30, 2)
    for position, step in enumerate(plan.steps):
        if isinstance(step, Free):
            uses = [p for p, _, reads, writes in Oracle(plan).accesses() if step.buffer in reads | writes]
            broken = move_step(plan, position, uses[-1])
            faults = {error.fault for error in find_lifetime_errors(broken) if error.buffer == step.buffer}
            assert LifetimeFault.USE_AFTER_FREE in faults
            assert_agrees(broken)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    num_kernels=st.integers(10, 40),
    num_streams=st.integers(1, 5),
    data=st.data(),
)
def test_random_mutations(seed, num_kernels, num_streams, data):
    plan = make_plan(seed, num_kernels, num_streams)
    for _ in range(data.draw(st.integers(1, 4), label="number of mutations")):
        position = st.integers(0, len(plan.steps) - 1)
        kind = data.draw(st.sampled_from(["drop", "swap", "move", "restream"]), label="mutation")
        if kind == "drop":
            broken = drop_step(plan, data.draw(position))
        elif kind == "swap":
            broken = swap_steps(plan, data.draw(position), data.draw(position))
        elif kind == "move":
            broken = move_step(plan, data.draw(position), data.draw(position))
        else:
            broken = restream_step(plan, data.draw(position), data.draw(st.integers(0, num_streams - 1)))
        if is_valid(broken):
            plan = broken
    assert_agrees(plan)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), num_streams=st.integers(1, 6))
def test_happens_before_is_the_transitive_closure(seed, num_streams):
    plan = make_plan(seed, 15, num_streams)
    order, oracle = HappensBefore(plan), Oracle(plan)
    steps = range(len(plan.steps))
    for first in steps:
        assert order.joined(first) == bool(oracle.end_mask >> first & 1)
        for second in steps:
            assert order.before(first, second) == oracle.before(first, second)
        for stream in range(num_streams):
            behind = [p for p in steps if plan.steps[p].stream == stream and oracle.before(first, p)]
            assert order.first_behind(stream, first) == min(behind, default=len(steps))
