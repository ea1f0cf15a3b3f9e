"""The definition of a workaround: which PyTorch versions it applies to, and how it is switched off."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

#: Decompositions by operator, as AOT autograd takes them.
Decompositions = Mapping[Any, Callable[..., Any]]
#: A part of PyTorch changed for the length of a ``with`` block. Not for several threads at once.
Patch = Callable[[], contextlib.AbstractContextManager[None]]


def _as_it_is(table: Decompositions) -> Decompositions:
    return table


@dataclass(frozen=True)
class Workaround:
    """Something of PyTorch's that is wrong, and what is done about it.

    Attributes:
        issue: Where it was reported, ``pytorch#185873``, or a name; so it is called in ``MILLSTREAM_WITHOUT``.
        effect: What happens without, in a few words.
        since: The first version of PyTorch that needs it; ``None`` where all that are supported do.
        until: The first version of PyTorch that does without; ``None`` while there is none.
        lowering: Around Inductor's scheduling and code generation.
        tracing: Around its passes over the graph of forward and backward.
        decompose: Adds decompositions to a table.
        captured_pass: Run on the graph as it was captured, before autograd; recompiles what it changes.
        joint_pass: Run on the graph of forward and backward before it is split.
        options: Options of Inductor.
        error: A part of the error that is raised without, if any is.
    """

    issue: str
    effect: str
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None
    lowering: Patch = contextlib.nullcontext
    tracing: Patch = contextlib.nullcontext
    decompose: Callable[[Decompositions], Decompositions] = _as_it_is
    captured_pass: Callable[[torch.fx.GraphModule], None] | None = None
    joint_pass: Callable[[torch.fx.Graph], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def applies(self) -> bool:
        """Whether this PyTorch needs it, and it is not switched off."""
        return self.is_needed and not is_off(self.issue)

    @property
    def is_needed(self) -> bool:
        """Whether this PyTorch needs it."""
        version = torch_version()
        return (self.since is None or self.since <= version) and (self.until is None or version < self.until)


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Have another function or table in a class or module for the length of the context, for all threads.

    Args:
        owner: The class or module.
        name: Of the function or table in it.
        new: Takes its place; a ``staticmethod`` where the function is one.
    """
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


PARTS: Mapping[str, str] = {
    "shortcuts": "TorchInductor is not spared any work, nor garbage collections while it compiles",
    "equal-kernels": "TorchInductor generates kernels that are equal but for names one by one",
    "comparison": "processes do not compare what they train by",
    "values": "programs are not checked for reads of what has been overwritten",
    "patches": "functions and classes of libraries may be replaced after a capture unnoticed",
    "own-kernels": "convolutions, linear layers and weights are left to TorchInductor and libraries",
    "native": "nothing of what is written in C++ is used: no step is recorded, and Python looks at all",
    "early-loads": "kernels of our own load nothing before the kernel in front has ended",
    "alternatives": "programs keep the usual kernels, and try no others",
    "pacing": "parameters are gathered as soon as they can be, and not when they are needed",
    "joint-branches": "kernels of branches of a graph are not fused, so that branches can be on several devices",
    "branches": "steps do not take both ways of a branch on a tensor's value",
    "flags": "steps do not hold for one outcome of a branch on what the state keeps",
}
"""What else is not needed, and can be switched off: what happens without, by the name in ``MILLSTREAM_WITHOUT``."""

_off: ContextVar[frozenset[str]] = ContextVar("workarounds that are off", default=frozenset())


@contextlib.contextmanager
def without(issues: Iterable[str]) -> Iterator[None]:
    """Do without these workarounds, or parts, in the ``with`` block, as ``MILLSTREAM_WITHOUT`` does everywhere."""
    token = _off.set(_off.get() | frozenset(issues))
    try:
        yield
    finally:
        _off.reset(token)


def is_off(name: str) -> bool:
    """Return whether a workaround, or one of ``PARTS``, is switched off."""
    return name in left_out()


def left_out() -> frozenset[str]:
    """Names of all that is switched off, and of what is nothing."""
    return _off.get().union(re.findall(r"[^\s,]+", os.environ.get("MILLSTREAM_WITHOUT", "")))


def torch_version() -> tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)
