"""Leaves of arguments are found more quickly than ``torch.utils._pytree`` does, which looks each type up.

Private APIs of FX; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import graph
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from millstream._torch.workarounds import replaced

_SEQUENCES = frozenset({tuple, list, immutable_list})
_MAPPINGS = frozenset({dict, immutable_dict})


def leaves(tree: Any, _is_leaf: Any = None) -> Iterator[Any]:
    """Yield the leaves of a tree, in the order of ``pytree.tree_iter``."""
    kind = type(tree)
    if kind in _SEQUENCES or kind in _MAPPINGS:
        for each in tree if kind in _SEQUENCES else tree.values():
            if type(each) in LEAVES:
                yield each
            else:
                yield from leaves(each)
    else:
        yield from pytree.tree_iter(tree)


LEAVES = frozenset({int, float, bool, str, type(None), graph.Node})


@contextlib.contextmanager
def quick_nodes() -> Iterator[None]:
    """Let nodes of graphs be made without looking up the types of their arguments, as torch 2.13 does for a warning."""
    if not hasattr(graph, "pytree"):
        yield
        return

    class Quick:
        tree_iter = staticmethod(leaves)

        def __getattr__(self, name: str) -> Any:
            return getattr(pytree, name)

    with replaced(graph, "pytree", Quick()):
        yield
