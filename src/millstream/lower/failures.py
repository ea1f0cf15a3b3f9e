"""An error from inside PyTorch's compiler: where it was, what the operator was, and what to leave out in another try.

Such an error is often a bare ``KeyError`` or ``AssertionError``. The frames it passed tell more: the stage that they
belong to, and the node of the graph that each had in hand.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from millstream.errors import MillstreamError
from millstream.lower.origins import source_line
from millstream.lower.workarounds import WORKAROUNDS

_PASSES = ("_inductor/fx_passes/", "_inductor/pattern_matcher")
_COMPILER = "Install g++ or clang, or name one in CXX; `millstream doctor` says what is found."
_KERNELS = ("_inductor/scheduler", "_inductor/codegen/", "_inductor/loop_body", "_inductor/sizevars")


@dataclass(frozen=True)
class Failure:
    """The known facts about an error.

    Attributes:
        reason: What was raised, and on which operator, in one line.
        where: The user's line that the operator comes from, or an empty string.
        remedy: What to do about it, if that is known.
    """

    reason: str
    where: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}, at {self.where}" if self.where else self.reason


def describe_failure(error: Exception) -> Failure:
    """Say in one line what was raised, on which operator, and where it was reported; and from which line that comes."""
    if type(error).__name__ == "InvalidCxxCompiler":  # a class of a private module; no operator is to blame
        tried = ", ".join(str(each) for each in torch._inductor.config.cpp.cxx if each) or "none"
        return Failure(f"no C++ compiler works here (tried: {tried}), and kernels for the CPU need one", "", _COMPILER)
    text = f"{type(error).__name__}: {first_line(str(error))}".removesuffix(": ")
    if isinstance(error, MillstreamError) or not _passes(error, ("torch/_inductor/", "torch/_functorch/")):
        return Failure(text, "")
    node = _find_node(error)
    known = _find_issue(f"{type(error).__name__}: {error}")
    parts = [text, "in PyTorch's compiler"]
    parts += [f"on {node.target}"] if node is not None else []
    parts += [f"(reported as {known})"] if known else []
    return Failure(" ".join(parts), source_line(node) if node is not None else "")


def other_tries(error: Exception) -> tuple[dict[str, Any], ...]:
    """Options of Inductor's to try with in turn after it has failed: they leave out what it was about."""
    if isinstance(error, MillstreamError):
        return ()
    if _passes(error, _PASSES):
        return ({"pattern_matcher": False},)
    if isinstance(error, AssertionError) or _passes(error, _KERNELS):
        return ({"loop_ordering_after_fusion": False}, {"loop_ordering_after_fusion": False, "max_fusion_size": 1})
    return ()


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _find_issue(text: str) -> str:
    return next((each.issue for each in WORKAROUNDS if each.error and each.error in text), "")


def _passes(error: Exception, files: tuple[str, ...]) -> bool:
    """Return whether an error was raised in one of these files, or in what they called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(part in frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames for part in files)


def _find_node(error: Exception) -> torch.fx.Node | None:
    """The operator that the innermost frame had in hand which had any."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if "/torch/_" in frame.f_code.co_filename.replace("\\", "/"):
            for value in frame.f_locals.values():
                for node in _nodes_of(value):
                    if node.op == "call_function":
                        return node
    return None


def _nodes_of(value: Any) -> Iterator[torch.fx.Node]:
    """The nodes of a graph that a local variable stands for: one, or those that a kernel was made of."""
    if isinstance(value, torch.fx.Node):
        yield value
        return
    module = type(value).__module__
    if module == "torch._inductor.scheduler" and hasattr(value, "get_nodes"):
        for part in value.get_nodes():
            yield from _nodes_of(getattr(part, "node", None))
    elif module == "torch._inductor.ir" and hasattr(value, "get_origins"):
        yield from value.get_origins()
