"""Choose the code that a trace records: that of users and libraries, down to PyTorch's operators."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import sympy
import torch

from millstream._torch.compiler.symbols import SymNode, calculating_methods
from millstream._torch.workarounds import replaced
from millstream.capture.lines import is_called_by_models, is_part_of_project
from millstream.capture.record.interpreter.instructions import run_unseen
from millstream.capture.record.recorder import Recorder

_RUNS_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Functions of PyTorch's that lead to code of the user's."""
_NAMESPACES = frozenset(
    """
    aten prims prim profiler inductor quantized quantized_decomposed rngprims c10d _c10d_functional c10d_functional
    """.split()
)
"""Of operators that PyTorch implements."""
_MACHINERY = tuple(
    f"{Path(package.__file__ or '').parent / name}{os.sep * (not name.endswith('.py'))}"
    for package, names in (
        (torch, "_ops.py _library _subclasses fx overrides.py utils/_python_dispatch.py utils/weak.py"),
        (sympy, "core printing utilities"),
    )
    for name in names.split()
)
"""What leads to handlers, what they leave for later, as when a tensor is gone, and what sizes are calculated by."""


def make_recorder(function: Callable[..., Any], arguments: Iterable[Any], wanted: tuple[type, ...] = ()) -> Recorder:
    """Return what records a trace."""
    return Recorder(_is_followed, [function, *arguments], wanted)


def _is_followed(filename: str) -> bool:
    """Return whether code counts.

    None of ours, nor what PyTorch runs on the way to an operator's handler, or to trace.
    """
    return not is_part_of_project(filename) and not filename.startswith(_MACHINERY)


@contextmanager
def until_operators(recorder: Recorder, functions: type, operators: type) -> Iterator[None]:
    """What runs below the modes for functions and operators is not recorded: a million instructions.

    Operators that are no PyTorch's, and backward passes, lead to code of the user's; functions that PyTorch has written
    in Python call others, which may have been replaced. PyTorch's C++ code calculates with symbolic sizes there, in
    Python.
    """
    if recorder.failure:
        yield
        return
    with ExitStack() as ends:
        for name, method in calculating_methods().items():
            ends.enter_context(replaced(SymNode, name, run_unseen(method)))
        for kind, name, is_seen in (
            (functions, "__torch_function__", _leads_to_users),
            (operators, "__torch_dispatch__", _is_anothers),
        ):
            ends.enter_context(replaced(kind, name, run_unseen(vars(kind)[name], is_seen)))
        yield


def _leads_to_users(function: Any) -> bool:
    if isinstance(function, FunctionType) and is_called_by_models(function.__code__.co_filename):
        return True
    try:
        return function in _RUNS_BACKWARD or _is_anothers(function)
    except TypeError:  # it has no hash
        return True


def _is_anothers(function: Any) -> bool:
    return type(function) in _OPERATORS and _is_implemented_elsewhere(function)


@functools.lru_cache(maxsize=1024)
def _is_implemented_elsewhere(operator: Any) -> bool:
    return str(operator).partition(".")[0] not in _NAMESPACES


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
