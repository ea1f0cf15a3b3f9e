"""The function mode.

It sees calls as the user wrote them (``.item()``, ``alpha=lr``), before their arguments are parsed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from millstream._torch.autograd.backward_hooks import is_active
from millstream._torch.one_thread import attributes_here
from millstream._torch.tensors import FakeTensor, is_real, is_unknown
from millstream._torch.tracing import (
    is_higher_order,
    mean_what,
)
from millstream.capture.lines import (
    is_ours,
    is_users,
    is_users_own,
    raise_refusal,
)
from millstream.capture.record.interpreter.instructions import seen
from millstream.capture.state.executed import function_asking
from millstream.capture.trace.numbers.known_arrays import ARRAYS, ReadArrays
from millstream.capture.trace.numbers.known_values import KnownValues
from millstream.capture.trace.numbers.scalar_functions import run_with_scalars
from millstream.capture.trace.numbers.scalars import GraphScalar
from millstream.capture.trace.numbers.sizes import ARE_SIZES, GIVE_SIZES, TracedSizes
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.capture.trace.twins import Twins
from millstream.capture.trace.watches.asked_values import ANSWERED, READ_REMEDY, VALUE_READERS, AskedValues
from millstream.capture.trace.watches.flows import FLOWS, Flows
from millstream.capture.trace.watches.given_tensors import fits, leaves_in, tensors_in
from millstream.capture.trace.watches.shards import Shards

_DATA = vars(torch._C.TensorBase)["data"]

_ALWAYS_REFUSED = frozenset({"numpy", "__array__", "__dlpack__"})
"""Those which give an answer for a fake tensor, though a wrong one, or fail obscurely."""

_PAST_OPERATORS = frozenset(
    {
        "grad",
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "rename_",
        "detach_",
    }
)
"""What changes a tensor, or reads what is another's, by no operator."""

_ASKED = frozenset({"storage_offset", "grad", "is_pinned", "is_shared", "_is_view", "output_nr"})

_OF_MEMORY = frozenset({"data_ptr", "untyped_storage", "storage", "_typed_storage", "_version", "_base"})
"""What differs from call to call without any meaning, or is not there while the step is traced."""


class FunctionWatch(TorchFunctionMode):
    """Puts twins in the place of the user's tensors, replaces the graph's scalars and refuses what needs values.

    Args:
        refuse: Told of each refusal, because the user's function may swallow the exception.
        twins: Those of the user's tensors.
        lifted: By id, tensors that are state.
        recorder: Of effects.
        sizes: Those of arguments, if some are symbols.
        kind: The class of traced tensors.
        unlifted: By id, tensors that the search has found and that cannot be lifted.
        on_unlifted: Called with such a one that is given to a function, or of which an attribute is read; raises.

    Attributes:
        calling: Name of the PyTorch function that runs now.
        moved: By id, tensors whose ``.data`` was assigned, and what has the memory that they had at first.
        looked_at: By id, lifted tensors that were given to any function, or of which an attribute was read.
        asked: By id, tensors of which the program has read what neither arguments nor inputs are compared by.
        shards: Which are rows of sharded parameters.
        arrays: NumPy's, as tensors.
        values: What is known of tensors' values.
        asked_values: What is said of those that nobody knows yet.
    """

    def __init__(
        self,
        refuse: Callable[[Exception], None],
        twins: Twins,
        lifted: set[int],
        recorder: EffectRecorder,
        sizes: TracedSizes | None = None,
        kind: type[FakeTensor] = FakeTensor,
        unlifted: Mapping[int, Any] = MappingProxyType({}),
        on_unlifted: Callable[[Tensor], NoReturn] | None = None,
    ) -> None:
        super().__init__()
        self._unlifted, self._on_unlifted = unlifted, on_unlifted
        self._kind = kind
        self._twins = twins
        self._sizes = sizes
        self._refuse = refuse
        self._lifted = lifted
        self.calling = ""
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}
        self.looked_at: set[int] = set()
        self.asked: set[int] = set()
        self.flows = Flows(twins, self.on, self.fail)
        self.shards = Shards(twins, self.fail)
        self.arrays = ReadArrays(recorder.questions, lambda: self.fail(*_NUMPY_READ))
        self.values = KnownValues()
        self.asked_values = AskedValues(
            self, twins, lifted, recorder, self.flows, self.values, self.fail, has_sizes=sizes is not None
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, function_asking(func, sys._getframe(1))
        twins, leaves = self._twins, leaves_in((*args, *kwargs.values()))
        self._note_used([*map(twins.real, leaves)])
        given = twins.real(args[0]) if args else None
        name = getattr(func, "__name__", "")
        args, kwargs = self._given(name, args, kwargs, leaves)
        if name == "numpy" and (array := self.asked_values.array(given, *args, **kwargs)) is not None:
            return array
        if name in _ALWAYS_REFUSED:
            self.fail(VALUE_READERS[name], READ_REMEDY)
        if name in ANSWERED and is_unknown(args[0]):
            answer = self.asked_values.answer(name, given, *args)
            if answer is not NotImplemented:
                return answer
        if name in ("register_hook", "register_post_accumulate_grad_hook") and id(given) in self._lifted:
            self.fail(
                "The step registers a hook on a parameter or other state.",
                "Change the gradient in the step, after backward.",
            )
        if name not in _INDEXING and any(map(issubclass, map(type, leaves), repeat(ARRAYS))):
            return self.arrays.given(name, args, kwargs)
        is_asked_by_user = self._sizes is not None and not is_ours(sys._getframe(1).f_code.co_filename)
        attribute = name if name != "__get__" else getattr(getattr(func, "__self__", None), "__name__", "")
        self._check_lifted(name, attribute, given)
        answer = self.shards.answer(func, attribute, args, [*map(twins.real, leaves)], sys._getframe(1))
        if answer is not NotImplemented:
            return answer
        if attribute in _ASKED:
            self.asked.add(id(given))
        if attribute in _OF_MEMORY:
            self._check_memory(attribute, sys._getframe(1).f_code.co_filename)
        if name == "__set__" and getattr(func, "__self__", None) is _DATA:
            return self._set_data(func, given, *args)
        if type(func) is FunctionType and any(map(isinstance, leaves, repeat(_FUNCTIONS))):
            args, kwargs = tuple(map(self._seen, args)), {key: self._seen(each) for key, each in kwargs.items()}
        result = self._call(func, args, kwargs, leaves, attribute if is_asked_by_user else None)
        return self.shards.noted(attribute, given, result)

    def _given(self, name: str, args: Any, kwargs: dict[str, Any], leaves: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments as PyTorch is given them, also in functions of control flow."""
        if any(map(self._twins.holds, leaves)):
            args, kwargs = self._twins.given(args, kwargs)
        if self.flows.is_inside:
            args, kwargs = self.flows.replaced(args), self.flows.replaced(kwargs)
        if name in _INDEXING and any(map(issubclass, map(type, leaves), repeat(_KNOWN))):
            args = (args[0], self.arrays.key(args[1], args[0].device), *args[2:])
        if name == "__getitem__" and not self.flows.is_inside:
            args = (args[0], self.values.masks_replaced(args[1]))
        return args, kwargs

    def _call(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], leaves: Sequence[Any], asked: str | None
    ) -> Any:
        """Let PyTorch do it; ``asked`` is what the user's code asks for, where sizes are symbols."""
        if is_higher_order(func) and func.__name__ in FLOWS:
            result = self.flows.call(func.__name__, lambda *given: self._run(func, given, kwargs, leaves, None), args)
            return self._twins.reals_in(result)
        if is_higher_order(func):
            args, kwargs = tree_map_only(FunctionType, _recorded, (args, kwargs))
        return self._run(func, args, kwargs, leaves, asked)

    def _run(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], leaves: Sequence[Any], asked: str | None
    ) -> Any:
        before, self.calling = self.calling, getattr(func, "__name__", "")
        try:
            if any(map(issubclass, map(type, leaves), repeat(GraphScalar))):
                return self._for_this_thread(run_with_scalars(func, args, kwargs))
            with seen() if any(map(_answers, leaves)) else nullcontext():
                result = self._for_this_thread(func(*args, **kwargs))
            if self.calling in _TO_HOST:
                self.asked_values.note_move(args[0], result)
            if asked is not None and (asked in GIVE_SIZES or type(result) in ARE_SIZES):
                return self._see_sizes(asked, args[0], result)
            return result
        finally:
            self.calling = before

    @contextmanager
    def on(self, *_: Any) -> Iterator[None]:
        """What the user's code runs in where PyTorch calls it: this mode, also if the call came through it."""
        with seen(), nullcontext() if is_active(self) else self:
            yield

    def _seen(self, function: Any) -> Any:
        """A function that PyTorch's Python is to call: it is given what the user's code has, and this mode is on."""
        if not isinstance(function, _FUNCTIONS):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.on():
                return self._twins.fakes_in(function(*self._twins.reals_in(args), **kwargs))

        return call

    def _for_this_thread(self, result: Any) -> Any:
        """Let other threads, which may find it where the program puts it, not compute with what has no values."""
        is_inside = self.flows.is_inside  # whose tracers take no other class for tensors of each other
        for each in tensors_in(leaves_in((result,))):
            if type(each) is FakeTensor and not is_inside:
                each.__class__ = self._kind
        return self._twins.reals_in(result)

    def _see_sizes(self, attribute: str, tensor: Tensor, result: Any) -> Any:
        assert self._sizes is not None
        if attribute == "__len__":
            self._sizes.note_length(tensor)
        return self._sizes.seen(result)

    def _set_data(self, func: Callable[..., Any], given: Any, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value`` gives ``tensor`` other memory, which no operator does: a tracer does not see it."""
        if not fits(value, tensor):
            self.fail(
                "The step assigns to .data a tensor of another shape, dtype or device.",
                "Change it outside of the step.",
            )
        with torch.no_grad():
            before, after = tensor.detach(), value.detach()
        func(tensor, after)
        mean_what(tensor, after)
        self.values.forget(tensor, value)
        self.moved.setdefault(id(given), (tensor, before))

    def _note_used(self, leaves: Sequence[Any]) -> None:
        self.looked_at.update(self._lifted.intersection(map(id, tensors_in(leaves))))
        if self._unlifted and self._on_unlifted is not None:
            for tensor in tensors_in(leaves):
                if id(tensor) in self._unlifted:
                    self._on_unlifted(tensor)

    def _check_lifted(self, name: str, attribute: str, tensor: Any) -> None:
        """Stop before something is done to the user's own tensor that no operator does."""
        if name != "__set__" and attribute not in _PAST_OPERATORS:
            return
        is_own = isinstance(tensor, Tensor) and is_real(tensor) and not self._twins.holds(tensor)
        if is_own and self._on_unlifted is not None:
            self._on_unlifted(tensor)

    def _check_memory(self, attribute: str, caller: str) -> None:
        """Refuse to say where a tensor is."""
        if is_users_own(caller):
            self.fail(f"The step reads a tensor's {attribute}.", "Compute with shapes and values only.")
        if attribute == "data_ptr" and is_users(caller):  # a kernel would be launched on what is nowhere
            raise RuntimeError("A library asks for the address of a tensor, which has none while a step is traced.")

    @contextmanager
    def unseen_refused(self) -> Iterator[None]:
        """For the length of the context, what no mode sees raises: it would touch the user's own tensors."""
        with (
            attributes_here(torch, from_numpy=lambda array: self.arrays.given("from_numpy", (array,), {})),
            attributes_here(torch._C, _swap_tensor_impl=lambda *_: self.fail_at_memory("_swap_tensor_impl")),
        ):
            yield

    def fail_at_memory(self, name: str) -> NoReturn:
        """Refuse what gives a tensor other memory."""
        self.fail(f"The step gives a tensor other memory with {name}().", "Use copy_().")

    def fail(self, reason: str, remedy: str) -> NoReturn:
        """Refuse the step, at the user's line."""
        raise_refusal(self._refuse, reason, remedy)


_FUNCTIONS = FunctionType, MethodType, functools.partial, nn.Module
"""What a function of PyTorch's may be given to call, as a distance for a loss."""

_TO_HOST = frozenset({"cpu", "to", "detach"})
"""Functions that give a tensor on the host that is one on a device."""

_INDEXING = frozenset({"__getitem__", "__setitem__"})

_KNOWN = (*ARRAYS, GraphScalar)

_NUMPY_READ = ("The step reads a NumPy array.", "Make a tensor of it outside of the step and pass that.")


def _answers(value: Any) -> bool:
    """Return whether PyTorch's C++ asks an object by methods that the user has written, as for an index."""
    if (kind := type(value)) is slice:
        return _answers(value.start) or _answers(value.stop) or _answers(value.step)
    if kind in _PLAIN or kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    return any(isinstance(vars(base).get(name), FunctionType) for base in kind.__mro__ for name in _ASKING)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, FakeTensor, Tensor})

_LIBRARIES = frozenset({"torch", "millstream", "numpy", "sympy"})

_ASKING = "__index__ __int__ __float__ __complex__ __bool__ __len__ __getitem__ __iter__ __array__".split()
"""Methods by which PyTorch's C++ asks an object for numbers and items."""


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that an operator is given, and calls where nothing is recorded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with seen():
            return function(*args, **kwargs)

    return call
