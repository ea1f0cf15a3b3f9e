"""Recording the operators that a function runs. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when a program needs a value, or a shape that depends on values."""


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """For the length of the context, distributions do not look at their parameters' values, as under torch.compile."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class, for calls from this thread; those from others go to the original."""
    original = vars(owner)[name]
    thread = threading.get_ident()

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, choose)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def pretend_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, so that optimizers read no values. Tried on 2.11 and 2.13."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def plain_recurrence() -> Iterator[None]:
    """Let ``nn.LSTM`` and ``nn.GRU`` on the CPU be recorded as the operators they consist of. Tried on 2.11 and 2.13.

    oneDNN's operator for a whole layer has a backward that cannot be run from a graph: it gives no workspace to fake
    tensors.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def no_compiled_modules() -> Iterator[None]:
    """Let what is ``torch.compile``d run as plain Python, so that it is traced. Tried on 2.11 and 2.13."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def trace_aten(body: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record the aten operators that ``body`` runs on the fake tensors ``inputs``, gradients included.

    The Python dispatcher is on: without it ``native_batch_norm`` writes running statistics that its schema denies.
    Backward runs on this thread, so that modes and source lines are seen there too. Tried on 2.11 and 2.13.
    """

    def flat(*_: Tensor) -> list[Tensor]:
        with enable_python_dispatcher():
            return list(body())

    with torch.autograd.set_multithreading_enabled(False):
        return make_fx(flat, _disable_torch_fn_metadata_mode=True)(*inputs)


def graph_being_traced() -> fx.Graph:
    """The graph that ``trace_aten`` is recording into. Tried on 2.11 and 2.13."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def is_higher_order(operator: Any) -> bool:
    """Whether an operator is one that takes functions, such as ``torch.cond``. Tried on 2.11 and 2.13."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


def mean_what(tensor: Tensor, other: Tensor) -> None:
    """From here on record what is done to ``tensor`` as done to ``other``, whose memory it has. Tried on 2.11, 2.13."""
    mode = get_proxy_mode()
    assert mode is not None
    set_proxy_slot(tensor, mode.tracer, get_proxy_slot(other, mode.tracer))


def next_sequence_number() -> int:
    """The number that autograd will give to the next node it makes. Tried on 2.11 and 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_sequence_number() -> int | None:
    """The number of the autograd node whose backward runs now, ``None`` outside of backward. Tried on 2.11 and 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
