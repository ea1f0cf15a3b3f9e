"""Every pass over an FX graph, in the order in which a graph meets them."""

from __future__ import annotations

from typing import Any

from millstream.kernels import registry
from millstream.lower import workarounds
from millstream.passes import cleanup, gradients, selecting
from millstream.passes.graph_pass import Pass

PASSES: tuple[Pass[..., Any], ...] = (
    # what a step was captured as
    selecting.merge_ways,
    cleanup.drop_idle_nodes,
    cleanup.subtract_powers_exactly,
    cleanup.move_constants,
    cleanup.hoist_transfers,
    cleanup.let_views_copy,
    cleanup.drop_unused_inputs,
    gradients.split_gradients,
    # before autograd, and the graph of forward and backward: what PyTorch gets wrong
    *workarounds.CAPTURED,
    *workarounds.JOINT,
    # inference on a GPU, before Inductor
    *registry.PASSES,
)
"""Each can be switched off by its name in ``MILLSTREAM_WITHOUT``, and says what it changes (``passes.graph_pass``)."""
