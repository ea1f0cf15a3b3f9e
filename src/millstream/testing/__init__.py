"""Public helpers for tests: graphs to try things on, safe plans, and ways to break them."""

from millstream.testing.graphs import (
    blocks_graph,
    chain_graph,
    data_parallel_graph,
    random_graph,
    towers_graph,
    training_graph,
    wavefront_graph,
)
from millstream.testing.plans import drop_step, move_step, restream_step, spread_plan, swap_steps

__all__ = [
    "blocks_graph",
    "chain_graph",
    "data_parallel_graph",
    "drop_step",
    "move_step",
    "random_graph",
    "restream_step",
    "spread_plan",
    "swap_steps",
    "towers_graph",
    "training_graph",
    "wavefront_graph",
]
