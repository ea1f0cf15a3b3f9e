"""Shadow mode: ``MILLSTREAM_RECORD=shadow`` records what is read and written beside the search that guards come from.

Nothing is decided by it: a difference is reported, and is a fault of one of the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from millstream.capture.lines import is_part_of_project
from millstream.capture.record.recorder import Recorder
from millstream.capture.record.session import run_unseen

VARIABLE = "MILLSTREAM_RECORD"

_RUNS_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Functions of PyTorch's that lead to code of the user's."""
_NAMESPACES = frozenset(
    """
    aten prims prim profiler inductor quantized quantized_decomposed rngprims c10d _c10d_functional c10d_functional
    """.split()
)
"""Of operators that PyTorch implements."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that one of the two has seen, and the other has not."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what}: {self.place}"


def make_recorder(function: Callable[..., Any], arguments: Iterable[Any]) -> Recorder | None:
    """What records a trace; ``None`` where none is asked for."""
    if os.environ.get(VARIABLE, "") != "shadow":
        return None
    return Recorder(_is_followed, [function, *arguments])


def _is_followed(filename: str) -> bool:
    """Whether code counts: none of ours, nor what PyTorch runs on the way to an operator's handler."""
    is_on_the_way = filename.endswith("/torch/_ops.py") or "/torch/_library/" in filename
    return not is_part_of_project(filename) and not is_on_the_way


def recorded(recorder: Recorder | None) -> Any:
    """The context in which the step runs."""
    return nullcontext() if recorder is None else recorder.recording()


@contextmanager
def until_operators(recorder: Recorder | None, functions: type, operators: type) -> Iterator[None]:
    """What runs below the modes for functions and operators is not recorded: a million instructions.

    Operators that are no PyTorch's, and backward passes, lead to code of the user's.
    """
    if recorder is None or recorder.failure:
        yield
        return
    handlers = ((functions, "__torch_function__", _leads_to_users), (operators, "__torch_dispatch__", _is_anothers))
    before = [(kind, name, vars(kind)[name]) for kind, name, _ in handlers]
    for kind, name, is_seen in handlers:
        setattr(kind, name, run_unseen(vars(kind)[name], is_seen))
    try:
        yield
    finally:
        for kind, name, value in before:
            setattr(kind, name, value)


def _leads_to_users(function: Any) -> bool:
    try:
        return function in _RUNS_BACKWARD or _is_anothers(function)
    except TypeError:  # it has no hash
        return True


def _is_anothers(function: Any) -> bool:
    is_operator = type(function) in (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return is_operator and str(function).partition(".")[0] not in _NAMESPACES
