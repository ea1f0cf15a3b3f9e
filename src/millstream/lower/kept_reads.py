"""What a forward pass reads of memory that it writes later is kept for the backward pass.

PyTorch chooses what the backward pass computes anew from the forward pass's inputs, and takes it that these are as they
were. A buffer that the forward pass has updated by then is not: a scale by a running mean, or ``spectral_norm``'s
vectors, give gradients that are wrong without a word, as in torch.compile (pytorch/pytorch#197039).

Inductor's passes over the joint graph, and a mark that AOT Autograd's partitioner heeds; tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

_COPY = torch.ops.aten.copy_.default


class KeepReads(CustomGraphPass):  # type: ignore[misc]
    """Marks, in a joint graph, who reads an input that is written: his result is saved, should the backward want it.

    Args:
        behind: A pass of the user's, or several, that come behind it; ``None`` for none.
    """

    def __init__(self, behind: Callable[[torch.fx.Graph], None] | list[Any] | tuple[Any, ...] | None) -> None:
        self._behind = [] if behind is None else [*behind] if isinstance(behind, (list, tuple)) else [behind]

    def __call__(self, graph: torch.fx.Graph) -> None:
        written = [node.args[0] for node in graph.find_nodes(op="call_function", target=_COPY)]
        for node in written:
            if isinstance(node, torch.fx.Node) and node.op == "placeholder":
                _keep_what_is_read(node)
        for each in self._behind:
            each(graph)

    def uuid(self) -> Any:
        """What caches know the pass by."""
        return "millstream.kept_reads", [getattr(each, "uuid", lambda each=each: repr(each))() for each in self._behind]


def _keep_what_is_read(source: torch.fx.Node) -> None:
    """Views are computed anew, and what is read through them is kept."""
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
