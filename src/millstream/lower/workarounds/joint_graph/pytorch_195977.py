"""A scan whose carry is also what its backward pass needs, as one that ends in ``tanh`` does, can be trained.

PyTorch has each turn return the carry once more, to be kept for the backward pass. With Inductor's decompositions that
is the very same tensor, which PyTorch's own check then refuses: a scan may not return one twice. Here it is a copy.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from millstream._torch.workarounds import Workaround, replaced

_CLONE = torch.ops.aten.clone.default


@contextlib.contextmanager
def _copy_repeated() -> Iterator[None]:
    scan: Any = importlib.import_module("torch._higher_order_ops.scan")  # the package has a function of this name
    prepare = scan.ScanAutogradImpl._optimize_forward_intermediates

    def prepare_and_copy(self: Any) -> None:
        prepare(self)
        _copy_repeated_results(self.hop_partitioned_graph.fw_gm)

    with replaced(scan.ScanAutogradImpl, "_optimize_forward_intermediates", prepare_and_copy):
        yield


def _copy_repeated_results(gm: torch.fx.GraphModule) -> None:
    output = next(iter(reversed(gm.graph.nodes)))
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    with gm.graph.inserting_before(output):
        for place, node in enumerate(results):
            if node in results[:place]:
                results[place] = gm.graph.call_function(_CLONE, (node,))
                results[place].meta = {**node.meta}
    output.args = (tuple(results),)
    gm.recompile()


WORKAROUND = Workaround(
    "pytorch#195977",
    "scans whose carry comes from tanh or sigmoid cannot be trained",
    tracing=_copy_repeated,
    error="scan might be aliasing the input or the output",
)
