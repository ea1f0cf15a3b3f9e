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
from torch._inductor import config

from millstream._torch.workarounds import is_off, replaced

_PYTORCHS = frozenset({"aten", "prim", "prims"})


def options_for_aten() -> dict[str, Any]:
    """Inductor's options for a graph as ``make_fx`` gives it.

    Its passes before autograd look for torch functions and modules, and write the graph's code four times. Those that a
    user has asked for are run.
    """
    asked = config.pre_grad_custom_pass, config.pre_grad_fusion_options, config.add_pre_grad_passes
    return {} if is_off("shortcuts") or any(asked) else {"use_pre_grad_passes": False}


@contextlib.contextmanager
def unwatched_first_run(graph: fx.Graph) -> Iterator[None]:
    """Let AOT autograd not watch the first run of what is compiled, unless there is a custom operator in the graph.

    It looks at each operator that runs meanwhile, also at those that time kernels and fill memory, for custom ones that
    return what they were given.
    """
    targets = [node.target for node in graph.nodes if node.op.startswith("call")]
    if is_off("shortcuts") or not all(_is_pytorchs(target) for target in targets):
        yield
        return
    begin = runtime_wrappers._FirstInvocationContext.__init__

    def begin_later(self: Any) -> None:
        begin(self)
        self._is_first = False

    with replaced(runtime_wrappers._FirstInvocationContext, "__init__", begin_later):
        yield


def _is_pytorchs(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _PYTORCHS
    return getattr(target, "__module__", None) == "_operator"
