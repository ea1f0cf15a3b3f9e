"""What Dynamo counts and decides. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def freeze_for_backends() -> None:
    """Let Dynamo make parameters attributes of graphs, for Inductor to fold, where the backend has ``freezes`` set.

    Inductor's own option is that of all backends, and in torch 2.11 of all threads. Tried on 2.11 and 2.13.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import builder

    if getattr(builder.is_parameter_freezing, "asks_backends", False):
        return
    asked_before = builder.is_parameter_freezing

    def is_parameter_freezing() -> bool:
        if asked_before():
            return True
        return not torch.is_grad_enabled() and _freezes(InstructionTranslator.current_tx().output.compiler_fn)

    is_parameter_freezing.asks_backends = True  # type: ignore[attr-defined]
    builder.is_parameter_freezing = is_parameter_freezing


def _freezes(backend: Any) -> bool:
    """Whether a backend, or what it wraps, has ``freezes`` set."""
    wrapped = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn", "func")
    while backend is not None and not hasattr(backend, "freezes"):
        backend = next((getattr(backend, name) for name in wrapped if hasattr(backend, name)), None)
    return bool(backend is not None and backend.freezes)


def known_obstacles() -> Counter[str]:
    """How often Dynamo has met what it cannot capture, by reason. Tried on 2.11 and 2.13."""
    from torch._dynamo.utils import counters

    return Counter[str](counters["graph_break"]) + Counter[str](counters["unimplemented"])


def num_refused_forms() -> int:
    """How often Dynamo has refused one more form of a function, of which it takes so many. Tried on 2.11 and 2.13."""
    from torch._dynamo.utils import counters

    return sum(number for reason, number in counters["unimplemented"].items() if "recompile limit" in reason)
