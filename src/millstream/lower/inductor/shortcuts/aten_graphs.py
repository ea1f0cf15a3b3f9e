"""What Inductor and AOT autograd do for graphs of torch functions, left out where a graph is of aten operators.

Private APIs of Inductor's options and of AOT autograd; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import runtime_wrappers
from torch._inductor import compile_fx, config

from millstream._torch.workarounds import replaced

_PYTORCHS = frozenset({"aten", "prim", "prims"})


@contextlib.contextmanager
def quick_aten_graphs() -> Iterator[None]:
    """Spare a step, whose graph ``make_fx`` has made, what is for graphs that Dynamo makes.

    - Inductor's passes before autograd look for torch functions and modules, and write the graph's code four times.
      Those that a user has asked for are run.
    - AOT autograd watches the first run of what is compiled: it looks at each operator that runs meanwhile, also at
      those that time kernels and fill memory, for custom ones that return what they were given.
    """
    run_passes, begin = compile_fx._recursive_pre_grad_passes, runtime_wrappers._FirstInvocationContext.__init__
    has_others = True

    def run_if_needed(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_others
        has_others = not all(_is_pytorchs(node) for node in gm.graph.nodes)
        asked = config.pre_grad_custom_pass, config.pre_grad_fusion_options, config.add_pre_grad_passes
        return run_passes(gm, *args, **kwargs) if has_others or any(asked) else gm

    def begin_later(self: Any) -> None:
        begin(self)
        self._is_first = has_others

    with (
        replaced(compile_fx, "_recursive_pre_grad_passes", run_if_needed),
        replaced(runtime_wrappers._FirstInvocationContext, "__init__", begin_later),
    ):
        yield


def _is_pytorchs(node: fx.Node) -> bool:
    """Return whether a node calls an operator of PyTorch's own, if it calls anything."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _PYTORCHS
    return not node.op.startswith("call") or getattr(node.target, "__module__", None) == "_operator"
