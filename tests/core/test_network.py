"""What collectives cost on a network, and what a step with them takes on other numbers of devices."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.check import check_plan
from millstream.cost import (
    NVLINK,
    Costs,
    KernelCost,
    Link,
    Network,
    Rate,
    Roofline,
    TimedReduction,
    fit_link,
    parse_link,
    parse_network,
)
from millstream.errors import ArgumentError
from millstream.graph import KernelKind, Launch, derive_dependencies, validate_graph
from millstream.schedule import plan_graph, plan_serial
from millstream.simulate import find_transfers, find_updates, leave_out, plan_beside, predict, simulate
from millstream.testing import data_parallel_graph

FREE = parse_network("free,free")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

rates = st.builds(Rate, st.floats(0, 1e5), st.floats(0, 1e5), st.floats(1e8, 1e12))
links = st.builds(Link, st.just("made up"), st.lists(rates, min_size=1, max_size=2).map(tuple))
networks = st.builds(Network, links, links, st.sampled_from([1, 2, 4, 8]))
devices = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64, 100, 512, 4096])


@given(networks, st.sampled_from(OPERATIONS), st.integers(0, 1 << 30), st.integers(0, 1 << 30), devices)
def test_more_bytes_take_no_less_time(network, operation, some, more, count):
    assert network.time_ns(operation, some, count) <= network.time_ns(operation, some + more, count)


@given(networks, st.sampled_from(OPERATIONS), st.integers(0, 1 << 30), devices)
def test_no_way_beats_the_link_of_a_device(network, operation, num_bytes, count):
    within, between = network.within.rates, network.between.rates
    host = min(count, network.per_host)
    passes = 2 if operation == "all_reduce" else 1
    bound_ns = passes * (host - 1) / host * num_bytes / max(rate.bytes_per_s for rate in within) * 1e9
    if count > network.per_host:
        all_adapters = network.per_host * max(rate.bytes_per_s for rate in between)
        hosts = math.ceil(count / network.per_host)
        bound_ns = max(bound_ns, passes * (hosts - 1) / hosts * num_bytes / all_adapters * 1e9)
    assert network.time_ns(operation, num_bytes, count) >= bound_ns * (1 - 1e-9) - 1


def test_ring_and_tree_by_hand():
    network = Network(Link("by hand", (Rate(1000, 10, 1e9),)))
    assert network.choose("all_reduce", 8_000_000, 8) == ("ring", 1000 + 14 * 10 + 14_000_000)
    assert network.choose("all_reduce", 8, 8) == ("tree", 1000 + 6 * 10 + 16)
    assert network.choose("all_gather", 8_000_000, 8) == ("ring", 1000 + 7 * 10 + 7_000_000)


def test_hosts_with_slow_adapters_exchange_in_two_levels():
    network = Network(Link("fast", (Rate(0, 0, 100e9),)), Link("slow", (Rate(0, 1e6, 1e9),)), per_host=4)
    # per pass: 3/4 of 4 GB at 100 GB/s in the hosts, half of 1 GB at 1 GB/s and one hop between them
    assert network.choose("all_reduce", 4_000_000_000, 8) == ("hierarchical", 2 * (30 + 500 + 1) * 10**6)
    quick = Network(network.within, Link("quick", (Rate(0, 0, 50e9),)), per_host=4)
    assert quick.choose("all_reduce", 4_000_000_000, 8) == ("ring", 2 * 35 * 10**6)


@pytest.mark.parametrize(
    ("text", "message"),
    [("warp", "no link is called 'warp'"), ("ib-0", "no link"), ("nvlink,ib-400,eth-1", "3 links"), ("", "no link")],
)
def test_unknown_networks_are_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_network(text)


def test_devices_beyond_a_host_need_a_link_between_hosts():
    with pytest.raises(ArgumentError, match=r"16 devices are more than one host of 8: name a link between hosts"):
        parse_network("nvlink").time_ns("all_reduce", 1, 16)


def test_the_rate_of_a_name_is_that_of_the_line():
    assert parse_link("ib-400").rates[0].bytes_per_s == pytest.approx(0.95 * 50e9)


# --- fitting ---------------------------------------------------------------------------------------------------------

SIZES = [1 << power for power in range(12, 28, 2)]


@settings(max_examples=30)
@given(st.floats(100, 1e5), st.floats(1, 5000), st.floats(1e9, 1e12))
def test_a_fit_finds_the_link_that_made_the_times(start_ns, hop_ns, bytes_per_s):
    made = Link("made", (Rate(start_ns, hop_ns, bytes_per_s),))
    times = [
        TimedReduction(n, size, start_ns + 2 * (n - 1) * (hop_ns + size / n / bytes_per_s * 1e9))
        for n in (2, 4, 8)
        for size in SIZES
    ]
    fitted = fit_link("fitted", times)
    assert fitted.measured_devices == 8
    for n in (2, 4, 8):
        for size in SIZES:
            expected = Network(made).time_ns("all_reduce", size, n)
            assert Network(fitted).time_ns("all_reduce", size, n) == pytest.approx(expected, rel=0.02, abs=2)


@pytest.mark.parametrize(
    "times",
    [
        [],
        [TimedReduction(2, 1024, 5.0)],
        [TimedReduction(2, 1024, 5.0)] * 4,
        [TimedReduction(1, 1, 1), TimedReduction(1, 9, 2)],
    ],
)
def test_too_few_times_are_refused(times):
    with pytest.raises(ArgumentError, match="measure more sizes"):
        fit_link("x", times)


def test_nvlink_is_what_fits_the_measured_sweep():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "collectives.json"
    measured = json.loads(path.read_text())
    times = [TimedReduction(each["devices"], each["bytes"], each["ns"]) for each in measured["times"]]
    fitted = fit_link("nvlink", times)
    for rate, known in zip(fitted.rates, NVLINK.rates, strict=True):
        assert rate.start_ns == pytest.approx(known.start_ns, rel=0.02)
        assert rate.bytes_per_s == pytest.approx(known.bytes_per_s, rel=0.02)
    for each in times:
        assert Network(NVLINK).time_ns("all_reduce", each.num_bytes, 2) == pytest.approx(each.time_ns, rel=0.05)


def test_nvlink_tells_four_devices_which_it_was_not_fitted_to():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "collectives_four.json"
    measured = [each for each in json.loads(path.read_text())["times"] if each["devices"] == 4]
    assert len(measured) > 10
    for each in measured:
        assert Network(NVLINK).time_ns("all_reduce", each["bytes"], 4) == pytest.approx(each["ns"], rel=0.21)


# --- a step with collectives -----------------------------------------------------------------------------------------

graphs = st.builds(
    data_parallel_graph,
    st.lists(st.sampled_from([4096, 1 << 20, 1 << 25]), min_size=1, max_size=12),
    st.integers(1, 4),
)


def plain(graph, duration_ns=20_000, share=0.0):
    return Costs(tuple(KernelCost(duration_ns, share, share) for _ in graph.kernels))


@settings(max_examples=30)
@given(graphs, st.booleans())
def test_collectives_beside_kernels_race_with_none(graph, eager):
    validate_graph(graph)
    plan = plan_beside(graph, eager=eager)
    launched = [step.kernel for step in plan.steps if isinstance(step, Launch)]
    assert sorted(launched) == [kernel.id for kernel in graph.kernels]
    check_plan(plan_serial(graph))
    needed = {(n, k.id) for k in graph.kernels for n in _needs(graph, k.id)}
    timeline = simulate(plan, plain(graph))
    begin = {span.kernel: span.start_ns for span in timeline.spans}
    end = {span.kernel: span.end_ns for span in timeline.spans}
    assert all(end[before] <= begin[after] for before, after in needed)


def _needs(graph, kernel):
    return [each.kernel for each in derive_dependencies(graph)[kernel]]


@settings(max_examples=30)
@given(graphs, st.booleans(), devices)
def test_a_network_that_costs_nothing_scales_perfectly(graph, eager, count):
    (found,) = predict(plan_beside(graph, eager=eager), plain(graph, share=0.3), FREE, [count])
    assert (found.efficiency, found.exposed_ns, found.transfers) == (1.0, 0, ())


@settings(max_examples=30)
@given(graphs, networks)
def test_one_device_takes_the_step_without_collectives(graph, network):
    kernels = [kernel.id for kernel in graph.kernels if kernel.kind is not KernelKind.COLLECTIVE]
    costs = plain(graph, share=0.3)
    (found,) = predict(plan_beside(graph), costs, network, [1])
    assert found.step_ns == found.one_ns == sum(costs.kernels[each].duration_ns for each in kernels)
    assert found.is_verified


@settings(max_examples=30)
@given(graphs, networks, st.booleans(), devices)
def test_a_step_lies_between_its_bounds(graph, network, eager, count):
    (found,) = predict(plan_beside(graph, eager=eager), plain(graph), network, [count])
    assert max(found.one_ns, found.communication_ns) <= found.step_ns <= found.one_ns + found.communication_ns
    assert found.step_ns == found.one_ns + found.exposed_ns  # kernels do not slow each other down here
    assert 0 < found.efficiency <= 1
    for each in found.transfers:
        assert each.ready_ns <= each.sent_ns <= each.done_ns
        assert each.exposed_ns + each.hidden_ns == each.took_ns


@settings(max_examples=30)
@given(graphs, networks, devices, st.floats(1.0, 10.0))
def test_a_slower_network_makes_no_step_quicker(graph, network, count, factor):
    slow = [Link("s", tuple(Rate(r.start_ns * factor, r.hop_ns * factor, r.bytes_per_s / factor) for r in link.rates))
            for link in (network.within, network.between)]  # fmt: skip
    plan = plan_beside(graph)
    (quick,) = predict(plan, plain(graph), network, [count])
    (slower,) = predict(plan, plain(graph), Network(*slow, network.per_host), [count])
    assert slower.step_ns >= quick.step_ns


@settings(max_examples=30)
@given(graphs, networks, devices)
def test_sending_as_soon_as_ready_is_never_slower(graph, network, count):
    (beside,) = predict(plan_beside(graph), plain(graph), network, [count])
    (between,) = predict(plan_beside(graph, eager=True), plain(graph), network, [count])
    assert beside.step_ns <= between.step_ns


@settings(max_examples=30)
@given(graphs, st.integers(1, 5))
def test_a_plan_that_leaves_out_collectives_keeps_the_order_of_the_rest(graph, num_streams):
    costs = plain(graph)
    plan = plan_graph(graph, costs, num_streams, "list")
    collectives = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    timeline = simulate(leave_out(plan, collectives), costs)
    begin = {span.kernel: span.start_ns for span in timeline.spans}
    end = {span.kernel: span.end_ns for span in timeline.spans}
    kept = [kernel.id for kernel in graph.kernels if kernel.id not in collectives]
    assert sorted(end) == kept
    for kernel in kept:
        assert all(end[need] <= begin[kernel] for need in _needs(graph, kernel) if need in end)


def test_transfers_by_hand():
    graph = data_parallel_graph([1 << 20, 1 << 20], 2)
    names = [kernel.name for kernel in graph.kernels]
    durations = {"forward0": 10, "forward1": 10, "gradient1": 10, "backward1": 10, "gradient0": 10}
    costs = Costs(tuple(KernelCost(durations.get(n, 15 if n.startswith("exchange") else 5), 0, 0) for n in names))
    first, second = find_transfers(graph, simulate(plan_beside(graph), costs))
    assert (first.ready_ns, first.sent_ns, first.done_ns, first.exposed_ns) == (30, 30, 45, 0)
    assert (second.ready_ns, second.sent_ns, second.done_ns, second.exposed_ns) == (50, 50, 65, 10)
    assert (first.num_bytes, first.operation, first.took_ns) == (1 << 20, "all_reduce", 15)
    assert {names[each] for each in find_updates(graph)} == {"update0", "update1"}


@pytest.mark.parametrize("count", [0, -1])
def test_no_device_is_refused(count):
    graph = data_parallel_graph([4096])
    with pytest.raises(ArgumentError, match=f"there are {count} devices"):
        predict(plan_beside(graph), Roofline().estimate(graph), FREE, [count])
