"""Every pass over an FX graph, in the order in which a graph meets them."""

from __future__ import annotations

import functools
import logging
from typing import Any

from millstream._torch.workarounds import PARTS
from millstream.errors import did_you_mean
from millstream.kernels import registry
from millstream.lower import workarounds
from millstream.lower.alternatives.table import ALTERNATIVES
from millstream.passes import (
    cleanup,
    gradients,
    joint_norms,
    micro_batches,
    new_values,
    pure_bodies,
    rolling,
    seeded_bodies,
    selecting,
)
from millstream.passes.graph_pass import Pass

PASSES: tuple[Pass[..., Any], ...] = (
    # what a step was captured as
    selecting.merge_ways,
    pure_bodies.make_bodies_pure,
    cleanup.drop_idle_nodes,
    cleanup.subtract_powers_exactly,
    cleanup.move_constants,
    cleanup.hoist_transfers,
    cleanup.let_views_copy,
    cleanup.drop_unused_inputs,
    gradients.split_gradients,
    joint_norms.join_norms,
    new_values.give_new_values,  # of a step
    rolling.roll_loops,  # of a step; of other graphs, and of what was changed in place, before Inductor
    seeded_bodies.seed_bodies,  # of a model's graph, before autograd
    # before autograd, and the graph of forward and backward: what PyTorch gets wrong
    *workarounds.CAPTURED,
    *workarounds.JOINT,
    # a step, before Inductor
    micro_batches.split_batch,
    # inference on a GPU, before Inductor
    *registry.PASSES,
)
"""Each can be switched off by its name in ``MILLSTREAM_WITHOUT``, and says what it changes (``passes.graph_pass``)."""


@functools.cache
def check_names(left_out: frozenset[str]) -> None:
    """Log once what ``MILLSTREAM_WITHOUT`` names and does not exist: it would have no effect, and nobody would know."""
    known = {*PARTS, *(each.issue for each in workarounds.WORKAROUNDS), *(each.name for each in PASSES)}
    known.update(each.name for each in (*registry.FAMILIES, *ALTERNATIVES))
    for name in sorted(left_out - known):
        logging.getLogger("millstream.passes").warning(
            "MILLSTREAM_WITHOUT names %r, which cannot be left out.%s", name, did_you_mean(name, known)
        )
