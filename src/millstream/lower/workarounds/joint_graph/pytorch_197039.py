"""Keep for the backward pass what a forward pass reads of memory that it writes later.

PyTorch chooses what the backward pass computes again from the forward pass's inputs, and takes it that these are as
they were. A buffer that the forward pass has updated by then is not: a scale by a running mean, or ``spectral_norm``'s
vectors, give gradients that are wrong without a word.

It is done by a mark that AOT autograd's partitioner heeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from millstream._torch.workarounds import Workaround

_COPY = torch.ops.aten.copy_.default


def _keep_reads(graph: torch.fx.Graph) -> None:
    """Mark the nodes of a joint graph that read an input which is written: the backward may want their results."""
    written = [node.args[0] for node in graph.find_nodes(op="call_function", target=_COPY)]
    for node in written:
        if isinstance(node, torch.fx.Node) and node.op == "placeholder":
            _keep_what_is_read(node)


def _keep_what_is_read(source: torch.fx.Node) -> None:
    """Views are recomputed, and what is read through them is kept."""
    views, seen = [source], {source}
    while views:
        view = views.pop()
        for user in view.users.keys() - seen:
            seen.add(user)
            if user.op == "output" or user.target is _COPY:
                continue
            if _share_memory(user, source):
                views.append(user)
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _share_memory(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    storages = [_storage(node.meta.get("val")) for node in (one, other)]
    return storages[0] is not None and storages[0] == storages[1]


def _storage(value: Any) -> int | None:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_plain else None


WORKAROUND = Workaround(
    "pytorch#197039",
    "wrong gradients of models that update what they have read",
    joint_pass=_keep_reads,
)
