import random

import pytest

from millstream.check import check_plan
from millstream.cost import Costs, KernelCost, Roofline
from millstream.errors import ArgumentError
from millstream.graph import KernelKind, Launch, Plan, Record, Wait, derive_dependencies, format_step
from millstream.schedule import (
    POLICIES,
    Assignment,
    assign_chains,
    assign_list,
    assign_offsets,
    assign_slack,
    critical_path_ns,
    peak_bytes,
    place_waits,
    plan_graph,
    plan_serial,
    rank_kernels,
)
from millstream.simulate import simulate
from millstream.testing import (
    assign_exact,
    blocks_graph,
    chain_graph,
    data_parallel_graph,
    random_graph,
    towers_graph,
    training_graph,
    wavefront_graph,
)

DIAMOND = ((), (0,), (0,), (1, 2))


def even_costs(graph, wait_ns=0, duration_ns=10):
    return Costs(tuple(KernelCost(duration_ns, 0.0, 0.0) for _ in graph.kernels), wait_ns)


def count(plan, kind):
    return sum(isinstance(step, kind) for step in plan.steps)


def test_ranks_are_the_work_that_must_follow():
    assert rank_kernels(DIAMOND, (1, 5, 2, 3)) == (9, 8, 5, 3)
    assert rank_kernels((), ()) == ()


def test_the_critical_path_is_the_longest_chain():
    graph = towers_graph(3, 5)
    assert critical_path_ns(graph, even_costs(graph)) == 50


@pytest.mark.parametrize("assign", [assign_list, assign_slack, assign_chains, assign_exact])
def test_a_diamond_goes_on_two_streams(assign):
    assignment = assign(DIAMOND, (1, 50, 30, 3), 10, 4)
    assert assignment == Assignment((0, 0, 1, 0), (0, 1, 11, 51), 54)


@pytest.mark.parametrize("assign", [assign_list, assign_slack, assign_exact])
def test_what_waits_would_cost_more_than_they_gain_stays_on_one_stream(assign):
    assert assign(DIAMOND, (1, 5, 5, 1), 10, 4).stream_of == (0, 0, 0, 0)


def test_a_kernel_moves_only_for_more_than_the_wait_costs():
    """After kernel 0, kernel 2 could start at 11 on another stream: worth a wait only where it saves over 10."""
    assert assign_list(((), (0,), (0,)), (1, 15, 15), 10, 2).stream_of == (0, 0, 0)
    assert assign_list(((), (0,), (0,)), (1, 25, 25), 10, 2).start_ns == (0, 1, 11)


def test_a_short_kernel_fills_a_gap():
    """Kernel 2 must wait for kernel 0 on the other stream; kernel 3, less urgent, runs meanwhile."""
    predecessors = ((), (), (0, 1), ())
    assignment = assign_list(predecessors, (50, 10, 50, 30), 5, 2)
    assert assignment.start_ns[3] == 10
    assert assignment.end_ns == 105 - 5


def test_the_longest_stream_is_stream_0():
    assert assign_list(((), ()), (5, 50), 0, 4) == Assignment((1, 0), (0, 0), 50)


def test_launches_are_issued_by_start_and_not_in_program_order():
    assert Assignment((0, 1, 0), (7, 3, 0), 9).launch_order() == [2, 1, 0]


@pytest.mark.parametrize("policy", ["list", "slack", "chains"])
@pytest.mark.parametrize("num_streams", [2, 3])
def test_collectives_have_a_stream_of_their_own(policy, num_streams):
    graph = data_parallel_graph([1 << 20] * 12, num_buckets=4)
    plan = plan_graph(graph, Roofline().estimate(graph), num_streams, policy)
    streams = {True: set(), False: set()}
    for step in plan.steps:
        if isinstance(step, Launch):
            streams[graph.kernels[step.kernel].kind is KernelKind.COLLECTIVE].add(step.stream)
    assert len(streams[True]) == 1
    assert 1 <= len(streams[False]) <= num_streams - 1
    assert not streams[True] & streams[False]


@pytest.mark.parametrize("assign", [assign_list, assign_slack, assign_chains])
def test_a_collective_starts_when_its_bucket_is_ready(assign):
    """Streams full of gradients have no gap as long as a collective: on one of them it would come last."""
    graph, wait_ns = data_parallel_graph([1 << 20] * 12, num_buckets=4), 3
    predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
    apart = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    durations = [35 if kernel.id in apart else 10 for kernel in graph.kernels]
    assignment = assign(predecessors, durations, wait_ns, 3, None, apart)
    for kernel in apart:
        ready = [
            assignment.start_ns[p] + durations[p] + wait_ns * (assignment.stream_of[p] != assignment.stream_of[kernel])
            for p in predecessors[kernel]
        ]
        assert assignment.start_ns[kernel] == max(ready)


def steps_of(order, stream_of, predecessors, num_streams):
    graph = chain_graph(len(stream_of))
    steps = place_waits(order, stream_of, predecessors, num_streams)
    return [format_step(graph, step).replace(" tower0_", ":") for step in steps]


def test_only_what_is_waited_for_is_recorded():
    assert steps_of([0, 1, 2, 3], [0, 1, 0, 0], DIAMOND, 2) == [
        *("s0 launch 0:0", "s0 record e0", "s1 wait e0", "s1 launch 1:1", "s1 record e1"),
        *("s0 launch 2:2", "s0 wait e1", "s0 launch 3:3"),
    ]


def test_only_the_latest_on_each_stream_is_waited_for():
    steps = steps_of([0, 1, 2], [1, 1, 0], ((), (), (0, 1)), 2)
    assert [step for step in steps if "wait" in step] == ["s0 wait e0"]
    assert steps.index("s1 record e0") == steps.index("s1 launch 1:1") + 1


def test_what_another_stream_has_waited_for_is_known():
    """0 on stream 0; 1 on stream 1 after it; 2 on stream 2 after both: waiting for 1 is enough."""
    steps = steps_of([0, 1, 2], [0, 1, 2], ((), (0,), (0, 1)), 3)
    assert [step for step in steps if step.startswith("s2 wait")] == ["s2 wait e1"]


def test_all_streams_are_joined_by_as_few_waits_as_possible():
    """Stream 2 ends after stream 1, so one wait joins both."""
    steps = steps_of([0, 1, 2], [0, 1, 2], ((), (), (1,)), 3)
    assert [step for step in steps if step.startswith("s0 wait")] == ["s0 wait e1"]
    assert steps[-1] == "s0 wait e1"


@pytest.mark.parametrize("policy", ["chains", "slack", "list"])
def test_towers_stand_on_streams_of_their_own(policy):
    graph = towers_graph(4, 10)
    plan = plan_graph(graph, even_costs(graph, wait_ns=100), 4, policy)
    assert plan.num_streams == 4
    assert count(plan, Wait) == count(plan, Record) == 3  # the joins
    assert peak_bytes(plan) == 4 * 2 * 1024
    streams_of_tower = {}
    for step in plan.steps:
        if isinstance(step, Launch):
            streams_of_tower.setdefault(step.kernel // 10, set()).add(step.stream)
    assert sorted(map(list, streams_of_tower.values())) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_stays_on_one_stream(policy):
    graph = chain_graph(20)
    plan = plan_graph(graph, even_costs(graph), 8, policy)
    assert plan.num_streams == 1
    assert plan.steps == plan_serial(graph).steps


def test_slack_saves_waits_on_wide_graphs():
    graph = towers_graph(40, 10)
    rng = random.Random(0)
    costs = Costs(tuple(KernelCost(rng.randint(1000, 9000)) for _ in graph.kernels), 1500)
    waits = {policy: count(plan_graph(graph, costs, 4, policy), Wait) for policy in POLICIES}
    assert waits["chains"] <= waits["slack"] < waits["list"] / 2


def test_an_empty_graph_can_be_planned():
    graph = chain_graph(0)
    for policy in POLICIES:
        assert plan_graph(graph, Costs(()), 4, policy) == Plan(graph, (), 1, policy)


@pytest.mark.parametrize("num_streams", [1, 2, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "graph",
    [blocks_graph(random.Random(1), 6), wavefront_graph(2, 8), training_graph(9), random_graph(random.Random(2), 60)],
)
def test_plans_of_every_shape_are_safe(graph, policy, num_streams):
    plan = plan_graph(graph, Roofline().estimate(graph), num_streams, policy)
    check_plan(plan)
    assert plan.num_streams <= num_streams
    assert plan.policy in (policy, "serial")


def test_over_budget_fewer_streams_are_taken():
    graph = towers_graph(8, 10)
    costs = even_costs(graph)
    need = {n: peak_bytes(plan_graph(graph, costs, n)) for n in range(1, 9)}
    assert need[8] > need[1]
    for budget in (need[8], need[4], need[1]):
        plan = plan_graph(graph, costs, 8, memory_bytes=budget)
        assert peak_bytes(plan) <= budget
        assert plan.num_streams == max(n for n in need if need[n] <= budget)
    with pytest.raises(ArgumentError, match=f"budget of 5 bytes is too small: .* needs {need[1]} bytes on one stream"):
        plan_graph(graph, costs, 8, memory_bytes=5)


def test_a_short_lookahead_does_not_put_off_what_nothing_waits_for():
    """On two streams half of the weight gradients would wait until the chain of input gradients is over."""
    graph = training_graph(60)
    costs = even_costs(graph, wait_ns=1, duration_ns=10)
    eager, near = (POLICIES["list"](graph, costs, 2, lookahead) for lookahead in (None, 16))
    assert peak_bytes(near) < 0.7 * peak_bytes(eager)
    assert simulate(near, costs).end_ns < 1.05 * simulate(eager, costs).end_ns


@pytest.mark.parametrize("packed", [False, True])
def test_over_budget_kernels_keep_closer_to_the_program_before_streams_are_given_up(packed):
    graph = training_graph(60)
    costs = even_costs(graph)

    def need(plan):
        return peak_bytes(plan, layout=assign_offsets(plan) if packed else None)

    budget = int(1.25 * need(plan_serial(graph)))
    assert need(plan_graph(graph, costs, 2)) > budget
    plan = plan_graph(graph, costs, 2, memory_bytes=budget, packed=packed)
    assert need(plan) <= budget
    assert plan.num_streams == 2


def test_bad_arguments_are_refused():
    graph = chain_graph(3)
    with pytest.raises(ArgumentError, match="no policy 'magic': choose one of 'serial', 'chains', 'slack', 'list'"):
        plan_graph(graph, even_costs(graph), 2, "magic")
    with pytest.raises(ArgumentError, match="cannot plan on 0 streams"):
        plan_graph(graph, even_costs(graph), 0)
    with pytest.raises(ArgumentError, match="costs are those of 4 kernels, graph '1 towers of 3' has 3"):
        plan_graph(graph, even_costs(chain_graph(4)), 2)
    with pytest.raises(ArgumentError, match="31 kernels are too many"):
        assign_exact([()] * 31, [1] * 31, 0, 2)


def test_the_list_is_near_the_best_there_is():
    ratios = []
    for seed in range(25):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(5, 9), locality=rng.random())
        predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
        durations = [rng.randint(1, 20) * 500 for _ in predecessors]
        arguments = (predecessors, durations, rng.choice([0, 1500]), rng.choice([2, 3]))
        best = assign_exact(*arguments).end_ns
        assert best >= max(rank_kernels(predecessors, durations))
        ratios.append(assign_list(*arguments).end_ns / best)
    assert min(ratios) >= 1
    assert sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize(("policy", "num_kernels"), [(policy, 3_000) for policy in POLICIES] + [("list", 10_000)])
def test_thousands_of_kernels(policy, num_kernels):
    graph = random_graph(random.Random(0), num_kernels)
    costs = Roofline().estimate(graph)
    check_plan(plan_graph(graph, costs, 8, policy))
