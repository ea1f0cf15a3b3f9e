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

_CLONE, _DETACHED = torch.ops.aten.clone.default, torch.ops.aten.detach_copy.default


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
    results: list[Any] = list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
    with gm.graph.inserting_before(output):
        for place, node in enumerate(results):
            if node in results[:place] or getattr(node, "op", "") == "placeholder":
                results[place] = gm.graph.call_function(_CLONE, (node,))
                results[place].meta = {**node.meta}
    if isinstance(output.args[0], list | tuple):
        output.args = (tuple(results),)
    gm.recompile()


def _copy_detached(gm: torch.fx.GraphModule) -> None:
    """Likewise in a step, where the scan is recorded with its backward pass, and some copies are none in the end."""
    for module in gm.modules():
        if module is not gm and isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=_DETACHED):
                node.target = _CLONE
            _copy_repeated_results(module)


WORKAROUND = Workaround(
    "pytorch#195977",
    "scans whose carry comes from tanh or sigmoid cannot be trained",
    tracing=_copy_repeated,
    captured_pass=_copy_detached,
    error="scan might be aliasing the input or the output",
)
