"""The checker by example; tests/faults compares it with brute force."""

from dataclasses import replace

import pytest

from millstream.check import LifetimeFault, check_plan, find_lifetime_errors, find_races
from millstream.errors import GraphError, PlanError
from millstream.graph import parse_plan
from millstream.schedule import plan_serial
from millstream.testing import swap_steps, towers_graph

GRAPH = """
graph g
inputs   (x)
outputs  (y)
buffers
  x  input      cuda:0  8
  t  temporary  cuda:0  8
  y  output     cuda:0  8
kernels
  0  fused  make   cuda:0  (x) -> (t)  from "model.py:1 in forward"
  1  fused  use    cuda:0  (t) -> (y)  from "model.py:2 in forward"
"""
SAFE = (
    "s0 allocate t, s0 launch 0, s0 record e0, s1 wait e0, s1 allocate y, "
    "s1 launch 1, s1 record e1, s0 wait e1, s0 free t"
)


def plan_of(steps, graph=GRAPH):
    return parse_plan("plan p on 3 streams\nsteps\n" + "".join(f"  {step}\n" for step in steps.split(",")) + graph)


def without(*dropped):
    return plan_of(",".join(step for step in SAFE.split(", ") if step not in dropped))


def test_the_safe_plan_is_safe():
    check_plan(plan_of(SAFE))


def test_a_race_tells_its_story():
    (race,) = find_races(without("s1 wait e0"))
    assert str(race) == (
        "race on buffer 't': nothing orders these:\n"
        "  step 1 on stream 0: kernel 0 'make' (model.py:1 in forward) writes it\n"
        "  step 4 on stream 1: kernel 1 'use' (model.py:2 in forward) reads it\n"
        "To mend it, record an event on stream 0 after the first, and let stream 1 wait for it before the second.\n"
        "The last steps that touched it:\n"
        "  step 0 on stream 0 allocates it\n"
        "  step 1 on stream 0: kernel 0 'make' (model.py:1 in forward) writes it\n"
        "  step 4 on stream 1: kernel 1 'use' (model.py:2 in forward) reads it"
    )
    assert not race.is_reversed


def test_the_wrong_order_on_one_stream_is_a_race():
    plan = plan_of("s0 allocate t, s0 allocate y, s0 launch 1, s0 launch 0")
    (race,) = find_races(plan)
    assert race.is_reversed
    assert (race.first.step, race.second.step) == (3, 2)
    assert "these run in the wrong order" in str(race)


def test_the_caller_comes_before_everything():
    """Stream 1 reads an input without waiting for stream 0: its start is after the start of stream 0."""
    check_plan(plan_of("s1 allocate t, s1 launch 0, s1 allocate y, s1 launch 1, s1 record e0, s0 wait e0"))


def test_a_missing_join_names_the_result_that_is_not_ready():
    (error,) = find_lifetime_errors(without("s0 wait e1", "s0 free t"))
    assert (error.fault, error.buffer, error.first.name) == (LifetimeFault.MISSING_JOIN, "y", "use")
    assert str(error).startswith(
        "buffer 'y' is still in use on another stream at the end of stream 0:\n  step 5 on stream 1"
    )


def test_even_a_temporary_must_be_joined():
    """The next run of the plan would overwrite it."""
    alone = GRAPH.replace("use    cuda:0  (t) -> (y)", "use    cuda:0  (x) -> (y)").replace("(x) -> (t)", "() -> (t)")
    plan = plan_of("s1 allocate t, s1 launch 0, s0 allocate y, s0 launch 1", alone)
    (error,) = find_lifetime_errors(plan)
    assert (error.fault, error.buffer) == (LifetimeFault.MISSING_JOIN, "t")


def test_a_kernel_that_touches_nothing_must_be_joined_too():
    empty = GRAPH.replace('(x) -> (t)  from "model.py:1 in forward"', "() -> ()").replace("(t) -> (y)", "(x) -> (y)")
    (error,) = find_lifetime_errors(plan_of("s1 launch 0, s0 allocate y, s0 launch 1", empty))
    assert (error.fault, error.buffer) == (LifetimeFault.MISSING_JOIN, None)
    assert str(error).startswith("no memory is still in use")


@pytest.mark.parametrize(
    ("steps", "faults"),
    [
        ("s0 launch 0, s0 allocate y, s0 launch 1", [LifetimeFault.NEVER_ALLOCATED]),
        ("s0 launch 0, s0 allocate t, s0 allocate y, s0 launch 1", [LifetimeFault.USE_BEFORE_ALLOCATE]),
        ("s0 allocate t, s0 launch 0, s0 allocate t, s0 allocate y, s0 launch 1", [LifetimeFault.ALLOCATED_TWICE]),
        ("s0 allocate t, s0 launch 0, s0 free t, s0 allocate y, s0 launch 1", [LifetimeFault.USE_AFTER_FREE]),
        (SAFE.replace("s0 wait e1, s0 free t", "s0 free t, s0 wait e1"), [LifetimeFault.EARLY_FREE]),
        (SAFE + ", s0 free t", [LifetimeFault.FREED_TWICE]),
        (
            "s0 free t, s0 allocate t, s0 launch 0, s0 allocate y, s0 launch 1",
            [LifetimeFault.FREE_BEFORE_ALLOCATE, LifetimeFault.USE_AFTER_FREE, LifetimeFault.USE_AFTER_FREE],
        ),
        (SAFE.replace("s0 free t", "s1 free t"), [LifetimeFault.FREED_ELSEWHERE]),
        ("s2 allocate t, s0 launch 0, s0 allocate y, s0 launch 1", [LifetimeFault.USE_BEFORE_ALLOCATE] * 2),
    ],
)
def test_lifetime_faults(steps, faults):
    plan = plan_of(steps)
    assert [error.fault for error in find_lifetime_errors(plan)] == faults
    with pytest.raises(PlanError, match="plan 'p' of graph 'g' is not safe to run"):
        check_plan(plan)


def test_an_operator_allocates_what_it_returns():
    graph = GRAPH.replace("(x) -> (t) ", "(x) -> (t)  allocates (t) ")
    check_plan(plan_of(SAFE.replace("s0 allocate t, ", ""), graph))
    elsewhere = SAFE.replace("s0 allocate t, ", "").replace("s0 free t", "s1 free t")
    (error,) = find_lifetime_errors(plan_of(elsewhere, graph))
    assert error.fault is LifetimeFault.FREED_ELSEWHERE


def test_the_error_carries_names_and_tells_only_the_first_faults():
    broken = without("s0 allocate t", "s1 wait e0", "s1 allocate y", "s0 wait e1")
    with pytest.raises(PlanError, match="6 faults found:\n\nrace on buffer 't'") as caught:
        check_plan(broken)
    assert str(caught.value).endswith("... and 3 more")
    assert (caught.value.kernel, caught.value.buffer, caught.value.step) == ("make", "t", 0)


def test_a_long_story_is_cut_to_its_end():
    graph = towers_graph(1, 2)
    readers = [replace(graph.kernels[1], id=number, writes=()) for number in range(2, 20)]
    plan = plan_serial(replace(graph, kernels=(*graph.kernels, *readers)))
    (error,) = find_lifetime_errors(swap_steps(plan, len(plan.steps) - 2, len(plan.steps) - 1))
    assert error.fault is LifetimeFault.USE_AFTER_FREE
    assert [access.kernel for access in error.story] == [15, 16, 17, 18, None, 19]


def test_an_invalid_plan_is_refused_first():
    with pytest.raises(PlanError, match="never launched"):
        check_plan(plan_of("s0 launch 0"))
    with pytest.raises(GraphError, match="unknown"):
        check_plan(plan_of(SAFE, GRAPH.replace("outputs  (y)", "outputs  (z)")))
