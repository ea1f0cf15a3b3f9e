"""Public helpers for tests: graphs to try things on, safe plans and ways to break them, and what is right for both."""

from millstream.testing.exact import assign_exact
from millstream.testing.execute import execute_graph, execute_plan
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
    "assign_exact",
    "blocks_graph",
    "chain_graph",
    "data_parallel_graph",
    "drop_step",
    "execute_graph",
    "execute_plan",
    "move_step",
    "random_graph",
    "restream_step",
    "spread_plan",
    "swap_steps",
    "towers_graph",
    "training_graph",
    "wavefront_graph",
]
