"""Random graphs and plans for hypothesis."""

import random

from hypothesis import strategies as st

from millstream.testing import random_graph, spread_plan


@st.composite
def graphs(draw, min_kernels=10, max_kernels=200, device="cuda:0"):
    return random_graph(
        random.Random(draw(st.integers(0, 2**32), label="seed")),
        draw(st.integers(min_kernels, max_kernels), label="kernels"),
        locality=draw(st.sampled_from([0.0, 0.5, 0.95]), label="locality"),
        views=draw(st.sampled_from([0.0, 0.3]), label="views"),
        in_place=draw(st.sampled_from([0.0, 0.2, 0.5]), label="in place"),
        operators=draw(st.sampled_from([0.0, 0.3]), label="operators"),
        device=device,
    )


@st.composite
def spread_plans(draw, max_kernels=60):
    seed = draw(st.integers(0, 2**32), label="plan seed")
    num_streams = draw(st.integers(1, 6), label="streams")
    return spread_plan(draw(graphs(max_kernels=max_kernels)), num_streams, random.Random(seed))
