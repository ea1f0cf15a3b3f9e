"""Graphs on several devices: never slower by prediction, near the best there is, within memory, and proven."""

import random
from dataclasses import replace
from itertools import product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.check import check_plan
from millstream.cost import Costs, KernelCost, Link, Rate
from millstream.errors import ArgumentError, PlanError
from millstream.graph import Buffer, Launch, Role, validate_graph
from millstream.placement import (
    Constraints,
    Machine,
    PlacedPlan,
    Placement,
    check_placement,
    check_streams,
    find_units,
    insert_copies,
    on_one,
    place,
    search,
)
from millstream.schedule import peak_bytes, plan_serial
from millstream.testing import chain_graph, random_graph, towers_graph, training_graph
from tests.properties.strategies import costs, graphs

LINK = Link("test", (Rate(0, 500, 50e9),))
FREE = Link("free", (Rate(0, 0, 1e18),))


@pytest.fixture(autouse=True, scope="module")
def _short_search():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_KERNELS", 2_000)
        yield


def machine(num_devices=2, link=LINK, streams=1, memory_bytes=None):
    bounds = None if memory_bytes is None else (memory_bytes,) * num_devices
    return Machine(tuple(f"cuda:{number}" for number in range(num_devices)), link, streams, bounds)


def equal_costs(graph, duration_ns=10_000):
    return Costs(tuple(KernelCost(duration_ns) for _ in graph.kernels), 400)


def assert_proven(graph, placed, order_only=()):
    validate_graph(placed.graph)
    check_placement(graph, placed.placement, placed.machine.home, order_only)
    check_plan(placed.plan)
    check_streams(placed.plan)
    check_plan(plan_serial(placed.graph))


@st.composite
def placements(draw, max_kernels=30):
    graph = draw(graphs(min_kernels=1, max_kernels=max_kernels))
    on = machine(draw(st.integers(1, 4)), draw(st.sampled_from([LINK, FREE])), draw(st.integers(1, 3)))
    return graph, draw(costs(graph, 1)), on


@given(placements())
@settings(max_examples=20)
def test_plans_are_proven_and_not_predicted_slower_than_one_device(case):
    graph, kernel_costs, on = case
    placed = place(graph, kernel_costs, on)
    assert_proven(graph, placed)
    assert placed.predicted_ns <= on_one(graph, kernel_costs, on).predicted_ns
    assert place(graph, kernel_costs, on).plan == placed.plan


@given(graphs(min_kernels=1, max_kernels=40), st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=20)
def test_any_placement_that_units_allow_is_proven(graph, num_devices, seed):
    rng, on, units = random.Random(seed), machine(num_devices), find_units(graph, Constraints())
    chosen = [0 if unit in units.fixed else rng.randrange(num_devices) for unit in range(units.num_units)]
    placement = insert_copies(graph, [on.devices[chosen[unit]] for unit in units.unit_of], on.home)
    assert_proven(graph, PlacedPlan(placement, placement.costs(equal_costs(graph), LINK), on))


def best_of_all(graph, kernel_costs, on):
    units = find_units(graph, Constraints())
    free = [unit for unit in range(units.num_units) if unit not in units.fixed]
    found = []
    for devices in product(on.devices, repeat=len(free)):
        chosen = dict(zip(free, devices, strict=True))
        placement = insert_copies(graph, [chosen.get(unit, on.home) for unit in units.unit_of], on.home)
        found.append(PlacedPlan(placement, placement.costs(kernel_costs, on.link), on).predicted_ns)
    return min(found)


def test_small_graphs_are_within_5_percent_of_the_best_placement():
    gaps = []
    for seed in range(9):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(3, 6), locality=rng.choice([0.0, 0.5]), views=0.0)
        kernel_costs = Costs(tuple(KernelCost(rng.randint(1, 20_000)) for _ in graph.kernels), 400)
        on = machine(2 + seed % 2)
        best = best_of_all(graph, kernel_costs, on)
        gaps.append(place(graph, kernel_costs, on).predicted_ns / best - 1)
    assert median(gaps) <= 0.05
    assert max(gaps) <= 0.3


def test_towers_go_to_devices_of_their_own():
    graph = towers_graph(4, 6)
    placed = place(graph, equal_costs(graph), machine(4))
    assert len({*placed.devices}) == 4
    assert placed.predicted_ns < 1.3 * on_one(graph, equal_costs(graph), machine()).predicted_ns / 4


def test_chain_stays_on_one_device():
    graph = chain_graph(12)
    assert place(graph, equal_costs(graph), machine(3)).devices == ("cuda:0",)


def test_state_is_changed_elsewhere_in_a_copy_that_comes_home():
    graph = training_graph(2, num_bytes=64)
    placed = insert_copies(graph, ["cuda:1"] * len(graph.kernels), "cuda:0").graph
    assert [kernel.writes for kernel in placed.kernels if kernel.name.startswith("update")] == [
        ("weight1@cuda:1",),
        ("weight0@cuda:1",),
    ]
    home = [placed.kernels[copy].writes for copy, link in placed.links.items() if link[1] == "cuda:0"]
    assert home == [("weight1",), ("weight0",)]


def test_what_is_there_for_the_order_alone_is_on_no_device():
    graph = towers_graph(2, 1)
    buffers = (*graph.buffers, Buffer("order", 16, "cuda:0", Role.STATE))
    first, second = graph.kernels
    kernels = (
        replace(first, reads=("x", "order")),
        replace(second, writes=(*second.writes, "order"), parts=("order",)),
    )
    ordered = replace(graph, kernels=kernels, buffers=buffers, inputs=(*graph.inputs, "order"))
    constraints = Constraints(order_only={"order"})
    assert not find_units(ordered, constraints).fixed
    placement = insert_copies(ordered, ["cuda:0", "cuda:1"], "cuda:0", {"order"})
    assert_proven(ordered, PlacedPlan(placement, placement.costs(equal_costs(ordered), LINK), machine()), {"order"})


def test_what_is_read_twice_elsewhere_crosses_once():
    graph = towers_graph(3, 2)
    placed = insert_copies(graph, ["cuda:1"] * len(graph.kernels), "cuda:0").graph
    assert [placed.kernels[copy].reads for copy, link in placed.links.items() if link[1] == "cuda:1"] == [("x",)]
    assert sum(link == ("cuda:1", "cuda:0") for link in placed.links.values()) == 3, "each result comes home"


def test_what_is_written_again_crosses_again():
    shape = training_graph(1, num_bytes=64)
    read = replace(shape.kernels[-1], id=len(shape.kernels), reads=("weight0",), writes=("forward0",))
    graph = replace(shape, kernels=(*shape.kernels, read))
    elsewhere = ["cuda:0" if k.name.startswith("update") else "cuda:1" for k in shape.kernels]
    placed = insert_copies(graph, [*elsewhere, "cuda:1"], "cuda:0").graph
    assert sum("weight0" in placed.kernels[copy].reads for copy in placed.links) == 2


def test_constants_do_not_cross_in_a_run():
    graph = towers_graph(2, 1)
    buffers = (*graph.buffers, Buffer("c", 64, "cuda:0", Role.CONSTANT))
    kernels = tuple(replace(kernel, reads=(*kernel.reads, "c")) for kernel in graph.kernels)
    placement = insert_copies(replace(graph, kernels=kernels, buffers=buffers), ["cuda:0", "cuda:1"], "cuda:0")
    assert placement.graph.kernels[-2].reads == ("x@cuda:1", "c@cuda:1")
    assert not any("c" in placement.graph.kernels[copy].reads for copy in placement.graph.links)


@pytest.mark.parametrize("shares", [(0.7, 0.8), (0.9, 0.5), (0.4, 0.4, 0.4, 0.4)])
def test_what_one_device_does_not_hold_is_divided_in_stages(shares):
    """With so many kernels, moving some at a time from where all are on one device leads nowhere."""
    graph = training_graph(60, num_bytes=1 << 20)
    needed = peak_bytes(plan_serial(graph))
    bounds = tuple(int(share * needed) for share in shares)
    placed = place(graph, equal_costs(graph), replace(machine(len(shares)), memory_bytes=bounds))
    assert_proven(graph, placed)
    for device, bound in zip(placed.machine.devices, bounds, strict=True):
        assert 0 < placed.bytes_on(device) <= bound


def test_what_fits_nowhere_is_refused():
    graph = training_graph(2, num_bytes=1 << 20)
    with pytest.raises(ArgumentError, match=r"room for 64 bytes on each of 2 devices .* needs \d+ bytes more"):
        place(graph, equal_costs(graph), machine(memory_bytes=64))
    with pytest.raises(ArgumentError, match="room for 64 bytes on cuda:0, 65 bytes on cuda:1 is too small"):
        place(graph, equal_costs(graph), replace(machine(), memory_bytes=(64, 65)))


def test_gradients_that_come_one_by_one_have_the_same_memory():
    """A link that brings all of them as soon as it can would need memory for each."""
    graph = training_graph(30, num_bytes=1 << 20)
    elsewhere = ["cuda:0" if kernel.name.startswith("update") else "cuda:1" for kernel in graph.kernels]
    placement = insert_copies(graph, elsewhere, "cuda:0")
    costs = placement.costs(equal_costs(graph), LINK)
    plenty, short = (PlacedPlan(placement, costs, machine(memory_bytes=bound)) for bound in (None, 1 << 30))
    assert plenty.bytes_on("cuda:0") >= 30 << 20
    assert short.bytes_on("cuda:0") <= 10 << 20
    assert_proven(graph, short)


# --- planted faults --------------------------------------------------------------------------------------------------


@pytest.fixture
def placed():
    """A step on two devices whose activations, weights and gradients cross."""
    graph, on = training_graph(3, num_bytes=64), machine()
    elsewhere = ["cuda:0" if kernel.name.startswith("update") else "cuda:1" for kernel in graph.kernels]
    placement = insert_copies(graph, elsewhere, on.home)
    return graph, PlacedPlan(placement, placement.costs(equal_costs(graph), LINK), on)


def without(placement, kernel):
    """The same without one kernel, and what reads its copy reads what it was a copy of."""
    kept = [k for k in placement.graph.kernels if k.id != kernel.id]
    names = {kernel.writes[0]: kernel.reads[0]}
    kernels = tuple(
        replace(k, id=number, reads=tuple(names.get(name, name) for name in k.reads)) for number, k in enumerate(kept)
    )
    origin = tuple(o for number, o in enumerate(placement.origin) if number != kernel.id)
    return Placement(replace(placement.graph, kernels=kernels), origin, placement.copy_of)


def moved(placement, kernel, position):
    """The same with one kernel elsewhere in the program."""
    pairs = list(zip(placement.graph.kernels, placement.origin, strict=True))
    pairs.insert(position, pairs.pop(kernel.id))
    kernels = tuple(replace(k, id=number) for number, (k, _) in enumerate(pairs))
    return Placement(replace(placement.graph, kernels=kernels), tuple(o for _, o in pairs), placement.copy_of)


def test_missing_copy_is_refused(placed):
    graph, found = placed
    assert found.graph.links
    for copy in found.graph.links:
        with pytest.raises(PlanError, match="a copy is missing"):
            check_placement(graph, without(found.placement, found.graph.kernels[copy]), "cuda:0")


def test_copy_too_early_is_refused(placed):
    graph, found = placed
    early = [k for k in map(found.graph.kernels.__getitem__, found.graph.links) if k.reads[0] not in graph.inputs]
    assert early
    for copy in early:
        with pytest.raises(PlanError, match="another value"):
            check_placement(graph, moved(found.placement, copy, 0), "cuda:0")
        steps = list(found.plan.steps)
        steps.insert(0, steps.pop(steps.index(next(s for s in steps if s == Launch(copy.id, s.stream)))))
        with pytest.raises(PlanError, match="not safe to run"):
            check_plan(replace(found.plan, steps=tuple(steps)))


def test_parameter_on_two_devices_is_refused(placed):
    graph, found = placed
    placement = found.placement
    copies = [name for name, origin in placement.copy_of.items() if origin in graph.inputs]
    assert copies
    for name in copies:
        buffers = tuple(replace(b, role=Role.STATE) if b.id == name else b for b in placement.graph.buffers)
        with pytest.raises(PlanError, match="the user's a second time"):
            check_placement(graph, replace(placement, graph=replace(placement.graph, buffers=buffers)), "cuda:0")
    update = next(k for k in placement.graph.kernels if k.name.startswith("update"))
    names = tuple(name for name in copies if placement.copy_of[name] in update.writes)
    elsewhere = replace(update, device="cuda:1", reads=names, writes=names)
    kernels = tuple(elsewhere if k is update else k for k in placement.graph.kernels)
    with pytest.raises(PlanError):
        check_placement(graph, replace(placement, graph=replace(placement.graph, kernels=kernels)), "cuda:0")


def test_stream_of_two_devices_is_refused(placed):
    _, found = placed
    assert found.plan.num_streams == 4, "two devices, and a link each way"
    merged = replace(found.plan, steps=tuple(replace(step, stream=0) for step in found.plan.steps))
    with pytest.raises(PlanError, match="and stream 0 is of"):
        check_streams(merged)
