"""Random numbers within a checkpointed region are kept for the backward pass where PyTorch is to draw them.

With ``fallback_random`` the partitioner draws them anew from a saved state of the generator, by an operator that runs
another one, which is no kernel. What was drawn takes less time to keep, and the numbers are the same.
"""

from __future__ import annotations

import operator

import torch
from torch._inductor import config
from torch.utils.checkpoint import CheckpointPolicy

from millstream._torch.workarounds import Workaround


def _keep(graph: torch.fx.Graph) -> None:
    if not config.fallback_random:
        return
    for node in graph.nodes:
        if "recompute" in node.meta and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            for each in (node, *(user for user in node.users if user.target is operator.getitem)):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


WORKAROUND = Workaround(
    "checkpointed-randoms",
    "an error on random numbers within activation checkpointing, with fallback_random",
    joint_pass=_keep,
)
