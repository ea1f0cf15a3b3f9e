"""Random graphs and plans for hypothesis."""

import random

from hypothesis import strategies as st

from millstream.cost import Costs, KernelCost
from millstream.schedule import POLICIES
from millstream.testing import random_graph, spread_plan


@st.composite
def graphs(draw, min_kernels=10, max_kernels=200, device="cuda:0", parts=True):
    return random_graph(
        random.Random(draw(st.integers(0, 2**32), label="seed")),
        draw(st.integers(min_kernels, max_kernels), label="kernels"),
        locality=draw(st.sampled_from([0.0, 0.5, 0.95]), label="locality"),
        views=draw(st.sampled_from([0.0, 0.3]), label="views"),
        in_place=draw(st.sampled_from([0.0, 0.2, 0.5]), label="in place"),
        operators=draw(st.sampled_from([0.0, 0.3]), label="operators"),
        parts=draw(st.sampled_from([0.0, 0.3, 0.7] if parts else [0.0]), label="parts"),
        device=device,
    )


@st.composite
def spread_plans(draw, max_kernels=60):
    seed = draw(st.integers(0, 2**32), label="plan seed")
    num_streams = draw(st.integers(1, 6), label="streams")
    return spread_plan(draw(graphs(max_kernels=max_kernels)), num_streams, random.Random(seed))


@st.composite
def costs(draw, graph, shortest_ns):
    rng = random.Random(draw(st.integers(0, 2**32), label="cost seed"))
    shares = draw(st.sampled_from([(0.0, 0.0), (0.3, 0.1), (1.0, 1.0)]), label="shares")
    bounds = draw(st.sampled_from([(shortest_ns, 3), (shortest_ns, 20_000), (500, 20_000)]), label="durations")
    kernels = tuple(
        KernelCost(rng.randint(*bounds), *(share * rng.random() for share in shares)) for _ in graph.kernels
    )
    wait_ns = draw(st.sampled_from([0, 1500, 100_000]), label="wait")
    return Costs(tuple(kernels), wait_ns, crowding=draw(st.sampled_from([0.0, 0.07, 0.9]), label="crowding"))


@st.composite
def cases(draw, max_kernels=200, shortest_ns=1):
    """A graph, its costs, a number of streams and a policy."""
    graph = draw(graphs(max_kernels=max_kernels))
    return (
        graph,
        draw(costs(graph, shortest_ns)),
        draw(st.integers(1, 8), label="streams"),
        draw(st.sampled_from(sorted(POLICIES)), label="policy"),
    )
