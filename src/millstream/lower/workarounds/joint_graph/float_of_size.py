"""A number that is made of symbolic sizes finds each size it is made of.

AOT autograd computes numbers that are no constants by tensors, and looks up the sizes in them among the graph's whole
numbers. Of ``numel / (numel - 1)``, by which BatchNorm scales a variance, a step's graph has the number of elements and
not the size of the batch: a ``KeyError``, so that each size was captured by itself. Dynamo's graphs have all sizes as
inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import graph_compile

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _add_missing() -> Iterator[None]:
    by_tensors = graph_compile.tensorify_python_scalars

    def with_sizes(gm: fx.GraphModule, *args: Any) -> None:
        if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in gm.graph.nodes):
            _add_sizes(gm.graph)
        by_tensors(gm, *args)

    with replaced(graph_compile, "tensorify_python_scalars", with_sizes):
        yield


def _add_sizes(graph: fx.Graph) -> None:
    """Begin a graph with each size that is a symbol, of the first input that has it."""
    inputs = graph.find_nodes(op="placeholder")
    values = [(node, node.meta.get("val")) for node in inputs]
    known = {value.node.expr for _, value in values if isinstance(value, torch.SymInt)}
    for node, value in values:
        for dimension, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and symbol not in known:
                known.add(symbol)
                with graph.inserting_after(inputs[-1]):
                    added = graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
                added.meta["val"] = size


WORKAROUND = Workaround(
    "float-of-size",
    "an error on numbers that are made of symbolic sizes in a step, as of BatchNorm with batches of any size",
    tracing=_add_missing,
)
