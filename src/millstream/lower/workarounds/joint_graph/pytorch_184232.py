"""``as_strided`` of an input that does not begin at the start of its memory finds the right elements.

Its offset counts from the start of that memory. Kernels are given where the input begins, and Inductor counted from
there: wrong numbers without a word, where they lie within what is allocated.
"""

from __future__ import annotations

import torch

from millstream._torch.workarounds import Workaround
from millstream.lower.views import AS_STRIDED, input_of, reaches_beyond


def _count_from_inputs(graph: torch.fx.Graph) -> None:
    """Write offsets as Inductor takes them."""
    for node in graph.find_nodes(op="call_function", target=AS_STRIDED):
        source = input_of(node)
        if source is None:
            continue
        offset = node.meta["val"].storage_offset() - source.meta["val"].storage_offset()
        if offset < 0:
            raise reaches_beyond(node, source)
        node.args, node.kwargs = (*node.args[:3], offset), {}


WORKAROUND = Workaround(
    "pytorch#184232",
    "wrong numbers of `as_strided` of a part of a tensor",
    until=(2, 13),
    joint_pass=_count_from_inputs,
)
