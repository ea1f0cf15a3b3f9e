"""Recording the operators that a function runs. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunction
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils._python_dispatch import _disable_current_modes

from millstream._torch.compiler.fake_lists import quick_fake_lists
from millstream._torch.one_thread import flagged, patched

VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when a program needs a value, or a shape that depends on values."""


def unchecked_distributions() -> AbstractContextManager[None]:
    """For the length of the context, distributions do not look at their parameters' values, as under torch.compile."""
    return flagged(Distribution, "_validate_args", value=False)


_LOGGED = {"torch._subclasses.fake_tensor": logging.ERROR, "torch.autograd.graph": logging.DEBUG}
"""Loggers of what happens to fake tensors, and of which level: failures, and each node of a backward pass."""


@contextlib.contextmanager
def fakes_unlogged() -> Iterator[None]:
    """For the length of the context, PyTorch does not log what this thread does to fakes. Tried on 2.11, 2.13."""
    thread = threading.get_ident()

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno != _LOGGED[record.name] or threading.get_ident() != thread

    logs = [logging.getLogger(name) for name in _LOGGED]
    for log in logs:
        log.addFilter(is_wanted)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_wanted)


def code_asking(func: Any, frame: FrameType) -> CodeType | None:
    """The code of the function of PyTorch's in whose name ``func`` is called by ``frame``, if that is another one.

    A function of PyTorch's that is written in Python has modes and subclasses of tensors called by its own name, as in
    ``handle_torch_function(silu, ...)``. Where a user has put another in its place, whether that calls it or not, the
    name is the other's.
    """
    asking = frame.f_back
    return None if frame.f_code is not _ASKING or asking is None or _is_of(func, asking.f_code) else asking.f_code


_ASKING = torch.overrides.handle_torch_function.__code__
_PYTORCH = f"{Path(torch.__file__).parent}{os.sep}"


def _is_of(func: Any, code: CodeType) -> bool:
    if isinstance(func, FunctionType):
        return func.__code__ is code or func.__code__.co_filename.startswith(_PYTORCH)
    is_operator = isinstance(func, torch._ops.OperatorBase | MethodWrapperType)
    return is_operator or getattr(func, "__name__", "") == code.co_name


def pretend_compiling() -> AbstractContextManager[None]:
    """Make ``torch.compiler.is_compiling()`` true, so that optimizers read no values. Tried on 2.11 and 2.13."""
    return flagged(torch.compiler, "_is_compiling_flag", value=True)


def scripts_as_python() -> AbstractContextManager[None]:
    """Let functions of ``torch.jit.script`` run as what they were made from, which a tracer sees into, as Dynamo does.

    Tried on 2.11 and 2.13.
    """
    call = vars(torch._C.ScriptFunction)["__call__"]

    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(script, "_torchdynamo_inline", None)
        return call(script, *args, **kwargs) if python is None else python(*args, **kwargs)

    return patched(torch._C.ScriptFunction, "__call__", run)


class _EagerHere:
    """PyTorch's stance towards what is compiled: for this thread, to run it as plain Python."""

    def __init__(self, before: Any) -> None:
        self._before = before
        self._thread: int | None = threading.get_ident()

    @property
    def stance(self) -> str:
        return "force_eager" if threading.get_ident() == self._thread else str(self._before.stance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)

    def end(self) -> None:
        self._thread = None


@contextlib.contextmanager
def no_compiled_modules() -> Iterator[None]:
    """Let what is ``torch.compile``d run as plain Python in this thread, so that it is traced. Tried on 2.11 and 2.13.

    ``torch.compiler.set_stance`` is for all threads.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        yield
        return
    # It looks PyTorch's functions up by their names, once, and again after a process group was made: not while others
    # stand in their place, as those that refuse to set a seed do.
    sys.modules["torch._dynamo.trace_rules"].get_torch_obj_rule_map()
    before = dynamo._stance
    dynamo._stance = stance = _EagerHere(before)
    try:
        yield
    finally:
        stance.end()
        dynamo._stance = before


_TRACE = inspect.unwrap(vars(fx.Tracer)["trace"])  # Dynamo puts a wrapper around it


def traces_unnoticed() -> AbstractContextManager[None]:
    """For the length of the context, FX in this thread leaves the whole process alone. Tried on 2.11 and 2.13.

    FX sets a flag of the process while it traces, at which compiled functions of all threads raise; two threads at once
    leave it on for good. It also replaces methods of ``nn.Module``, which ``make_fx`` has no use for: that records
    operators.
    """
    assert isinstance(_TRACE, FunctionType)
    assert "_is_fx_tracing_flag" in _TRACE.__code__.co_names

    def trace(self: fx.Tracer, *args: Any, **kwargs: Any) -> fx.Graph:
        own = {**_TRACE.__globals__, "_is_fx_tracing_flag": False}
        if isinstance(self, PythonKeyTracer):
            own |= _NOTHING_PATCHED
        private = FunctionType(_TRACE.__code__, own, _TRACE.__name__, _TRACE.__defaults__, _TRACE.__closure__)
        return private(self, *args, **kwargs)  # type: ignore[no-any-return]

    return patched(fx.Tracer, "trace", trace)


class _NoPatcher:
    def patch_method(self, *_: Any, **__: Any) -> None:
        pass


_NOTHING_PATCHED: dict[str, Any] = {
    "_new_patcher": lambda: contextlib.nullcontext(_NoPatcher()),
    "_patch_wrapped_functions": lambda *_: None,
    "_autowrap_check": lambda *_: None,
}
"""What FX's tracer finds in place of its own globals."""


def trace_aten(body: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record the aten operators that ``body`` runs on the fake tensors ``inputs``, gradients included.

    The Python dispatcher is on: without it ``native_batch_norm`` writes running statistics that its schema denies.
    Backward runs on this thread, so that modes and source lines are seen there too. Tried on 2.11 and 2.13.
    """

    def flat(*_: Tensor) -> list[Tensor]:
        with enable_python_dispatcher():
            return list(body())

    with torch.autograd.set_multithreading_enabled(False), traces_unnoticed(), quick_fake_lists():
        return make_fx(flat, _disable_torch_fn_metadata_mode=True)(*inputs)


def graph_being_traced() -> fx.Graph:
    """The graph that ``trace_aten`` is recording into. Tried on 2.11 and 2.13."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


class NewInputs:
    """Adds inputs to the graph that ``trace_aten`` is recording into, while it does. Tried on 2.11 and 2.13.

    Args:
        last: Of the inputs that there are, so many come first.
    """

    def __init__(self, mode: FakeTensorMode, last: int) -> None:
        proxies = get_proxy_mode()
        assert proxies is not None
        self._mode, self._tracer = mode, proxies.tracer
        inputs = self._tracer.graph.find_nodes(op="placeholder")
        self._last: fx.Node | None = inputs[last - 1] if last else None
        self._num_added = 0

    def add(self, dtype: torch.dtype, device: torch.device, shape: Sequence[int] = ()) -> Tensor:
        """Make an input; it comes after those that came first and those made before."""
        graph = self._tracer.graph
        with (
            graph.inserting_before() if self._last is None else graph.inserting_after(self._last),
            DisableTorchFunction(),
            torch._C._DisableFuncTorch(),  # type: ignore[attr-defined]
            _disable_current_modes(),
        ):
            tensor = FakeTensor(self._mode, torch.empty(shape, dtype=dtype, device="meta"), device)
            proxy = self._tracer.create_proxy("placeholder", f"number_{self._num_added}", (), {})
            track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)
        self._last = proxy.node
        self._num_added += 1
        return tensor


def is_higher_order(operator: Any) -> bool:
    """Return whether an operator is one that takes functions, such as ``torch.cond``. Tried on 2.11 and 2.13."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


def run_apart(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run a function on tensors like these, and record nothing of it. Tried on 2.11 and 2.13."""
    from torch._higher_order_ops.utils import materialize_as_graph

    with torch.no_grad():
        materialize_as_graph(function, tuple(args))


def is_recorded() -> Callable[[Tensor], bool]:
    """Return whether the graph being traced has a tensor; asked later, too. Tried on 2.11 and 2.13."""
    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    return lambda tensor: get_proxy_slot(tensor, tracer, None) is not None


def node_of(tensor: Tensor) -> fx.Node | None:
    """Of a tensor, its node in the graph being traced; ``None`` if that has none. Tried on 2.11 and 2.13."""
    mode = get_proxy_mode()
    found: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if found is None else found.proxy.node  # type: ignore[no-any-return]


@contextlib.contextmanager
def known_shapes(tensors: Sequence[Any]) -> Iterator[None]:
    """For the length of the context, let a loop be recorded on fake tensors of known shapes. Tried on 2.11 and 2.13.

    PyTorch asks their mode for its symbols, which it has none of; these are as strict about values.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = next((each.fake_mode for each in tensors if isinstance(each, FakeTensor)), None)
    if mode is None or mode.shape_env is not None:
        yield
        return
    mode.shape_env = ShapeEnv(**_STRICT)
    try:
        yield
    finally:
        mode.shape_env = None


def compiled_with_loops(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """For the length of the context, let a graph with loops on real tensors be compiled. Tried on 2.11 and 2.13.

    As above: where nothing is fake, PyTorch makes a mode without symbols.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if torch._guards.detect_fake_mode(inputs) is not None or torch._guards.TracingContext.try_get() is not None:
        return contextlib.nullcontext()
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(**_STRICT))
    known: dict[str, Any] = {"static_shapes": True, "symbolic_context": None}  # no symbols for the inputs' sizes
    mode.from_tensor = lambda tensor, **kwargs: FakeTensorMode.from_tensor(mode, tensor, **{**kwargs, **known})
    return torch._guards.tracing(torch._guards.TracingContext(mode))


_STRICT: dict[str, Any] = {"allow_scalar_outputs": False, "allow_dynamic_output_shape_ops": False}
"""What symbols are made with where no value is to become one."""


def root_being_traced() -> torch.nn.Module:
    """Return what has the functions that operators of the graph being traced are given. Tried on 2.11 and 2.13."""
    mode: Any = get_proxy_mode()
    assert mode is not None
    return mode.tracer.root  # type: ignore[no-any-return]


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
