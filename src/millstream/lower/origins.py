"""Where a kernel comes from: the operators, the user's line and module, and the stream, by its aten nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from millstream._torch.compiler.node_notes import stream_hint_of


def told_by(origins: Iterable[torch.fx.Node]) -> dict[str, Any]:
    """What aten nodes tell of the kernel that is made of them, as arguments of ``Kernel``."""
    lead = next((origin for origin in origins if source_line(origin)), None)
    return {
        "source": "" if lead is None else source_line(lead),
        "hint": _hint_of(origins),
        "module": "" if lead is None else module_path(lead),
    }


def op_names(origins: Iterable[torch.fx.Node]) -> tuple[str, ...]:
    """Names of the operators that a kernel is made of, without what only keeps a layout or stands for another one."""
    names = dict.fromkeys(_op_name(origin) for origin in origins if origin.op == "call_function")
    return tuple(name for name in names if name not in ("fn", "inductor_force_stride_order", "keep_strides"))


def _op_name(node: torch.fx.Node) -> str:
    """Short name of an operator: ``relu`` for ``aten.relu.default``; the node's own for what Inductor put in."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__) if packet is not None else re.sub(r"_\d+$", "", node.name)


def _hint_of(origins: Iterable[torch.fx.Node]) -> str | None:
    """The stream that a kernel was written for; of several the first by name, as somebody has fused what is there."""
    return min((hint for origin in origins if (hint := stream_hint_of(origin)) is not None), default=None)


def module_path(node: torch.fx.Node) -> str:
    """The path of the user's module that an aten node comes from, or its forward pass's node; else nothing."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        if path and not path.startswith("_empty"):
            return re.sub(r"\['(\w+)'\]", r".\1", re.sub(r"^L\['\w+'\]\.?", "", path)).strip(".")
    return ""


def source_line(node: torch.fx.Node) -> str:
    """The user's line behind an aten node, as ``file:line in function``; else its module, else nothing."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    if frames:
        file, line, function = frames[-1]
        return f"{file}:{line} in {function}"
    for path, kind in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if path and not path.startswith("_empty"):
            path = re.sub(r"^L\['\w+'\]\.?", "", path)  # how Dynamo names the argument that a model is
            return " ".join(part for part in ("module", path, f"({getattr(kind, '__name__', kind)})") if part)
    return ""
