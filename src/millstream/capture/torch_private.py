"""Every private part of PyTorch that whole-step capture touches, one function each.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as nn_module
from torch import Tensor, fx
from torch._C._dynamo.guards import TensorGuards
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when a program needs a value, or a shape that depends on values."""


def swap_contents(left: Tensor, right: Tensor) -> None:
    """Exchange what two tensor objects are: class, attributes, storage, gradient; every reference to them stays.

    ``torch.utils.swap_tensors`` does the same for good and therefore refuses tensors with other owners; here the
    exchange is undone soon, so that other owners never notice. Tried on 2.11 and 2.13.
    """
    torch._C._swap_tensor_impl(left, right)  # first, because it may refuse
    left.__class__, right.__class__ = right.__class__, left.__class__
    left.__dict__, right.__dict__ = right.__dict__, left.__dict__


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


def mean_what(tensor: Tensor, other: Tensor) -> None:
    """From here on record what is done to ``tensor`` as done to ``other``, whose memory it has. Tried on 2.11, 2.13."""
    mode = get_proxy_mode()
    assert mode is not None
    set_proxy_slot(tensor, mode.tracer, get_proxy_slot(other, mode.tracer))


def is_real(tensor: Tensor) -> bool:
    """Whether ``tensor`` has values, rather than being fake or a wrapper of ``torch.func``. Tried on 2.11 and 2.13."""
    return not isinstance(tensor, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_id(tensor: Tensor) -> int:
    """A number that is equal exactly for tensors that share memory, fake or not. Tried on 2.11 and 2.13."""
    return int(tensor.untyped_storage()._cdata)


def is_same_view(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors, fake or not, are the same part of the same memory."""
    return (
        storage_id(left) == storage_id(right)
        and left.storage_offset() == right.storage_offset()
        and left.stride() == right.stride()
    )


def layout_check(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A quick look whether each of ``tensors`` has its sizes, strides and dtype still, and its demand for a gradient.

    Dynamo's own guard, 40 ns a tensor; ``stride()`` and ``shape`` take 180. Tried on 2.11 and 2.13.
    """
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return functools.partial(guards.check, *tensors)


def next_sequence_number() -> int:
    """The number that autograd will give to the next node it makes. Tried on 2.11 and 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_sequence_number() -> int | None:
    """The number of the autograd node whose backward runs now, ``None`` outside of backward. Tried on 2.11 and 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def call_without_grad(function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)`` as under ``torch.no_grad()``, which costs a microsecond more. Tried on 2.11 and 2.13."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return function(argument)
    finally:
        torch._C._set_grad_enabled(before)


def is_any_autocast_enabled() -> bool:
    """Whether this thread computes in other types on any device; asked in every call. Tried on 2.11 and 2.13."""
    return bool(torch._C._is_any_autocast_enabled())


def modes_of_caller() -> tuple[Any, ...]:
    """What of this thread sees or changes each operator: devices as such, the rest as names; asked in every call.

    Tried on 2.11 and 2.13.
    """
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    looking = torch.is_anomaly_enabled()
    if not (functions or dispatches or saving or looking):
        return ()
    modes: list[Any] = [torch._C._get_function_stack_at(i) for i in range(functions)]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(dispatches)]
    names = [mode.device if isinstance(mode, DeviceContext) else type(mode).__name__ for mode in modes]
    return (*names, *(["saved_tensors_hooks"] if saving else []), *(["anomaly mode"] if looking else []))


def count_hooks() -> int:
    """Number of hooks registered so far in this process, on tensors, modules and optimizers. Tried on 2.11 and 2.13."""
    return RemovableHandle.next_id


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Hooks that run whenever any module is called. Tried on 2.11 and 2.13."""
    return *nn_module._global_forward_pre_hooks.values(), *nn_module._global_forward_hooks.values()


def hooks_for_all() -> tuple[dict[int, Any], ...]:
    """Where hooks are that run whenever any module is called, or any optimizer steps. Tried on 2.11 and 2.13."""
    return (
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_backward_pre_hooks,
        nn_module._global_backward_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


def hooks_of_module(module: torch.nn.Module) -> tuple[Any, ...]:
    """Hooks that run when ``module`` is called. Tried on 2.11 and 2.13."""
    return *module._forward_pre_hooks.values(), *module._forward_hooks.values()


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Hooks that run when ``optimizer`` steps. Tried on 2.11 and 2.13."""
    return *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether the user registered a hook on ``tensor`` that runs during backward. Tried on 2.11 and 2.13."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether the user registered a hook on ``module`` that runs during backward. Tried on 2.11 and 2.13."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def has_global_backward_hooks() -> bool:
    """Whether the user registered one on all modules. Tried on 2.11 and 2.13."""
    return bool(nn_module._global_backward_hooks) or bool(nn_module._global_backward_pre_hooks)


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


__all__ = [
    "VALUE_NEEDED",
    "FakeTensor",
    "FakeTensorMode",
    "call_without_grad",
    "count_hooks",
    "freeze_for_backends",
    "graph_being_traced",
    "has_backward_hooks",
    "has_global_backward_hooks",
    "has_tensor_hooks",
    "is_any_autocast_enabled",
    "is_real",
    "is_same_view",
    "known_obstacles",
    "layout_check",
    "mean_what",
    "modes_of_caller",
    "next_sequence_number",
    "no_compiled_modules",
    "num_refused_forms",
    "patched",
    "plain_recurrence",
    "pretend_compiling",
    "running_sequence_number",
    "storage_id",
    "swap_contents",
    "trace_aten",
]
