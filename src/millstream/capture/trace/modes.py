"""Modes that watch and steer the user's function while it is traced: one for functions and one for operators.

The function mode sees calls as the user wrote them (``.item()``, ``alpha=lr``), before their arguments are parsed; the
operator mode sees the aten operators they become, backward included.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress, repeat
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from millstream._torch.backward_hooks import is_active
from millstream._torch.checkpointing import RandomRecords
from millstream._torch.compiler.node_notes import current_stream_hint, note_stream_hint
from millstream._torch.dispatcher import is_expanded_later
from millstream._torch.one_thread import attributes_here
from millstream._torch.tensors import FakeTensor, asks_device, device_of_fake, is_real, is_unknown, storage_id
from millstream._torch.tracing import (
    VALUE_NEEDED,
    graph_being_traced,
    is_higher_order,
    mean_what,
    next_sequence_number,
    root_being_traced,
    running_sequence_number,
)
from millstream.capture.effects.checks import find_check
from millstream.capture.effects.effect_recorder import EffectRecorder
from millstream.capture.lines import (
    describe,
    here,
    is_ours,
    is_users,
    is_users_own,
    module_path,
    raise_refusal,
    user_frames,
)
from millstream.capture.record.instructions import seen, unseen
from millstream.capture.state.executed import function_asking
from millstream.capture.trace.flows import FLOWS, Flows, why_not_a_body
from millstream.capture.trace.numbers.known_arrays import ARRAYS, ReadArrays
from millstream.capture.trace.numbers.known_values import LIFTS, KnownValues
from millstream.capture.trace.numbers.numpy_arrays import LaterArray, array_of
from millstream.capture.trace.numbers.scalar_functions import run_with_scalars
from millstream.capture.trace.numbers.scalars import GraphScalar
from millstream.capture.trace.numbers.sizes import ARE_SIZES, GIVE_SIZES, TracedSizes
from millstream.capture.trace.shards import Shards
from millstream.capture.trace.twins import Twins
from millstream.passes.cleanup import IS_DECIDED

aten = torch.ops.aten
_DATA = vars(torch._C.TensorBase)["data"]

VALUE_READERS = {
    "item": "The step reads a tensor's value with .item().",
    "tolist": "The step reads a tensor's values with .tolist().",
    "numpy": "The step turns a tensor into a NumPy array.",
    "__array__": "The step turns a tensor into a NumPy array.",
    "__dlpack__": "The step hands a tensor on by DLPack.",
    "__bool__": "The step branches on a tensor's value.",
    "__float__": "The step reads a tensor's value with float().",
    "__int__": "The step reads a tensor's value with int().",
    "__index__": "The step uses a tensor's value as an index.",
    "__contains__": "The step branches on a tensor's value.",
    "__repr__": "The step prints a tensor.",
    "__format__": "The step prints a tensor.",
    "equal": "The step branches on tensors' values.",
    "allclose": "The step branches on tensors' values.",
}
"""What users do with values, by the name of the function they call."""

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

MOST_READ = 256
"""Numbers that a step may read from tensors, of which each costs a node of the graph; ``tolist()`` reads its own."""

_TAKE_CLASSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose kernels refuse targets of other types than int64 and uint8, and whose fake ones take them."""


def _check_targets(func: Any, args: tuple[Any, ...]) -> None:
    if func in _TAKE_CLASSES and (dtype := args[1].dtype) not in (torch.int64, torch.uint8):
        name = {torch.int32: "Int", torch.int16: "Short", torch.int8: "Char"}.get(dtype, str(dtype))
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {name}")


READ_REMEDY = (
    "Read it with .item(), whose value can be formatted, logged, stored and returned, or outside of the step; for a"
    " branch use torch.where."
)
SHAPE_REMEDY = (
    "Use torch.where or a mask that multiplies, so that shapes do not depend on values; of a mask that stays the same,"
    " take the positions outside of the step: mask.nonzero(as_tuple=True)."
)


class ForeignTensor(Exception):  # noqa: N818 - a message to the tracer, which lifts the tensor and starts again
    """A real tensor that was not lifted has been met."""

    def __init__(self, tensor: Tensor, where: str) -> None:
        super().__init__(where)
        self.tensor = tensor
        self.where = where


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
        branches: Lines of those on values that the step has met; may be set, and grow, later.
        calling: Name of the PyTorch function that runs now.
        moved: By id, tensors whose ``.data`` was assigned, and what has the memory that they had at first.
        looked_at: By id, lifted tensors that were given to any function, or of which an attribute was read.
        asked: By id, tensors of which the program has read what neither arguments nor inputs are compared by.
        shards: Which are rows of sharded parameters.
        arrays: NumPy's, as tensors.
        values: What is known of tensors' values.
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
        self.branches: Sequence[str] = ()
        self._unlifted, self._on_unlifted = unlifted, on_unlifted
        self._kind = kind
        self._twins = twins
        self._sizes = sizes
        self._refuse = refuse
        self._lifted = lifted
        self._recorder = recorder
        self.calling = ""
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}
        self.looked_at: set[int] = set()
        self.asked: set[int] = set()
        self._on_host: dict[int, tuple[Tensor, Tensor]] = {}  # by id, copies on the host, and of what
        self.flows = Flows(twins, self.on, self._fail)
        self.shards = Shards(twins, self._fail)
        self.arrays = ReadArrays(recorder.questions, lambda: self._fail(*_NUMPY_READ))
        self.values = KnownValues()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, function_asking(func, sys._getframe(1))
        twins, leaves = self._twins, _leaves((*args, *kwargs.values()))
        self._note_used([*map(twins.real, leaves)])
        given = twins.real(args[0]) if args else None
        name = getattr(func, "__name__", "")
        args, kwargs = self._given(name, args, kwargs, leaves)
        if name == "numpy" and (array := self._array(given, *args, **kwargs)) is not None:
            return array
        if name in _ALWAYS_REFUSED:
            self._fail(VALUE_READERS[name], READ_REMEDY)
        if name in _ANSWERED and is_unknown(args[0]):
            answer = self._answer(name, given, *args)
            if answer is not NotImplemented:
                return answer
        if name in ("register_hook", "register_post_accumulate_grad_hook") and id(given) in self._lifted:
            self._fail(
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
                self._note_move(args[0], result)
            if asked is not None and (asked in GIVE_SIZES or type(result) in ARE_SIZES):
                return self._see_sizes(asked, args[0], result)
            return result
        finally:
            self.calling = before

    def note_conversion(self) -> None:
        """A tensor whose value is not known is asked for it: a trace that sees ``float()`` might get on."""
        self._recorder.questions.num_converted += self.calling in ("__float__", "__int__")

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
        for each in _tensors_in(_leaves((result,))):
            if type(each) is FakeTensor and not is_inside:
                each.__class__ = self._kind
        return self._twins.reals_in(result)

    def _see_sizes(self, attribute: str, tensor: Tensor, result: Any) -> Any:
        assert self._sizes is not None
        if attribute == "__len__":
            self._sizes.note_length(tensor)
        return self._sizes.seen(result)

    def _answer(self, name: str, given: Any, tensor: Tensor, *how: Any) -> Any:
        """Return what can be said of a tensor without values; ``NotImplemented`` if that is for PyTorch to say."""
        if self.flows.is_inside and name in VALUE_READERS:
            self._fail("A function that control flow is given reads a tensor's value.", READ_REMEDY)
        is_read = name in _READ and not (name == "item" and self.branches)  # what is read there may be another way's
        if is_read and (value := unseen(self.values.read, tensor, name)) is not NotImplemented:
            return value
        if name == "tolist":
            with self:  # which sees each number
                return FakeTensor.tolist(tensor)  # type: ignore[arg-type]
        if name == "__bool__":
            is_check = tensor.numel() == 1 and find_check() is not None
            return bool(self._recorder.item(tensor)) if is_check else NotImplemented
        if name == "__deepcopy__":
            is_plain = tensor.is_contiguous() and not tensor.requires_grad
            return how[0].setdefault(id(given), tensor.clone()) if is_plain else NotImplemented
        return self._read_later(name, tensor, *how, given=given)

    def _read_later(self, name: str, tensor: Tensor, *how: Any, given: Any) -> Any:
        """Numbers and text that are known after the replay."""
        if name == "__format__" and tensor.dim() == 0:
            return self._recorder.text(tensor, lambda value: format(value, *how))
        if name in ("__repr__", "__format__"):
            is_named = name == "__repr__" and issubclass(type(given), nn.Parameter)  # by its class, before it asks
            return self._recorder.text(tensor, _repr_as(tensor, is_named=is_named))
        if tensor.numel() != 1 or tensor.dtype.is_complex:
            self._fail(VALUE_READERS[name], READ_REMEDY)
        if len(self._recorder.kept) >= MOST_READ:
            self._fail(f"The step reads more than {MOST_READ} numbers from tensors.", READ_REMEDY)
        return self._recorder.item(tensor)

    def _array(self, given: Any, tensor: Tensor, *, force: bool = False) -> LaterArray | None:
        """The array of a tensor's values; ``None`` where eager PyTorch gives none, or one of the user's own memory."""
        if force:
            tensor = tensor.detach().cpu()
        is_state = id(given) in self._lifted or storage_id(tensor) in self._memory_of_state
        is_seen = is_state or self.flows.is_inside
        if tensor.requires_grad or tensor.device.type != "cpu" or is_seen or self._sizes is not None:
            return None
        inputs = (each.tensor for each in self._recorder.questions.inputs)
        is_argument = any(storage_id(tensor) == storage_id(each) for each in (*self._twins.fakes, *inputs))
        _, source = self._on_host.get(id(tensor), (None, None))
        if source is not None:  # which a graph on its device gives: the host copies it, after the graph
            tensor = source
        leaf = self._recorder.array(tensor.detach().clone() if is_argument or source is not None else tensor)
        return array_of(tensor, leaf, self._recorder.questions)

    def _note_move(self, given: Any, result: Any) -> None:
        """Note of what on a device a tensor on the host is a copy."""
        if is_unknown(given) and is_unknown(result) and result.device.type == "cpu":
            source = given if given.device.type != "cpu" else self._on_host.get(id(given), (None, None))[1]
            if source is not None and source.dtype == result.dtype:
                self._on_host[id(result)] = result, source

    @functools.cached_property
    def _memory_of_state(self) -> set[Any]:
        twins = self._twins
        return {
            storage_id(fake) for fake, real in zip(twins.fakes, twins.tensors, strict=True) if id(real) in self._lifted
        }

    def _set_data(self, func: Callable[..., Any], given: Any, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value`` gives ``tensor`` other memory, which no operator does: a tracer does not see it."""
        if not fits(value, tensor):
            self._fail(
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
        self.looked_at.update(self._lifted.intersection(map(id, _tensors_in(leaves))))
        if self._unlifted and self._on_unlifted is not None:
            for tensor in _tensors_in(leaves):
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
            self._fail(f"The step reads a tensor's {attribute}.", "Compute with shapes and values only.")
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
        self._fail(f"The step gives a tensor other memory with {name}().", "Use copy_().")

    def _fail(self, reason: str, remedy: str) -> NoReturn:
        raise_refusal(self._refuse, reason, remedy)


_FUNCTIONS = FunctionType, MethodType, functools.partial, nn.Module
"""What a function of PyTorch's may be given to call, as a distance for a loss."""

_TO_HOST = frozenset({"cpu", "to", "detach"})
"""Functions that give a tensor on the host that is one on a device."""

_READ = frozenset({"item", "tolist", "__bool__"})

_ANSWERED = frozenset({"item", "__repr__", "__format__", "tolist", "__bool__", "__deepcopy__"})
"""What is asked of a tensor that has no values, and can be had after the replay or in another way."""


def _repr_as(traced: Tensor, *, is_named: bool) -> Callable[[Tensor], str]:
    """Return how to show a tensor whose values are there as one that autograd knows."""
    node = traced.grad_fn
    before = "Parameter containing:\n" if isinstance(traced, nn.Parameter) and not is_named else ""
    if node is None and not traced.requires_grad:
        return lambda value: before + repr(value)
    shown = "requires_grad=True" if node is None else f"grad_fn=<{type(node).__name__}>"
    return lambda value: before + repr(value.detach().requires_grad_()).replace("requires_grad=True", shown)


_INDEXING = frozenset({"__getitem__", "__setitem__"})
_KNOWN = (*ARRAYS, GraphScalar)

_NUMPY_READ = ("The step reads a NumPy array.", "Make a tensor of it outside of the step and pass that.")


_BELOW = {aten.lt.Scalar: True, aten.le.Scalar: True, aten.gt.Scalar: False, aten.ge.Scalar: False}
"""Comparisons of a number drawn from [0, 1), and their outcome where it is below the other, whatever it is."""


class UniformDraws:
    """Follows tensors of ``torch.rand`` to where they are compared with a number, and to branches that go one way only.

    BART and its like draw a number for each layer in training, and leave the layer out if it is below the probability,
    which may be zero.
    """

    def __init__(self) -> None:
        self._draws = WeakIdKeyDictionary()  # the node of each
        self._outcomes = WeakIdKeyDictionary()  # of comparisons: what is drawn, and how each comes out

    def see(self, operator: Any, args: tuple[Any, ...], result: Any, graph: fx.Graph) -> None:
        """Note an operator that has run; its node is the graph's last."""
        if operator is aten.rand.default:
            self._draws[result] = next(iter(reversed(graph.nodes)))
        elif operator in _BELOW and isinstance(args[1], int | float) and args[0] in self._draws:
            below = _BELOW[operator]
            if args[1] >= 1:
                self._outcomes[result] = self._draws[args[0]], below
            elif args[1] < 0 or (args[1] == 0 and operator in (aten.lt.Scalar, aten.ge.Scalar)):
                self._outcomes[result] = self._draws[args[0]], not below

    def outcome(self, tensor: Tensor) -> bool | None:
        """Return how a comparison comes out; ``None`` where that depends on what is drawn."""
        node, outcome = self._outcomes.get(tensor, (None, None))
        if node is not None:
            node.meta[IS_DECIDED] = True
        return outcome


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices tensors that were not lifted, notes source lines, and reuses random results in recomputation.

    Args:
        refuse: Told of each refusal, because the user's function may swallow the exception.
        twins: Those of the user's tensors.
        functions: The function mode in force, for the names of what users call.
        randoms: Random results of checkpointed regions.
        write_numbers_down: Has the graph depend on the user's numbers as they are.
        check_switches: Called with each operator and its arguments; may raise an error there.
        choose: Gives the outcome of a branch on a tensor's value, with which the trace goes on; ``None`` where there is
            none.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether PyTorch is to switch Dynamo off at each operator. It is off as long as a step is traced."""
        return False

    def __init__(
        self,
        refuse: Callable[[Exception], None],
        twins: Twins,
        functions: FunctionWatch,
        randoms: RandomRecords,
        write_numbers_down: Callable[[], None],
        check_switches: Callable[[Any, Sequence[Any]], None],
        choose: Callable[[Tensor], bool | None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse
        self._check_switches = check_switches
        self._choose = choose
        self._write_numbers_down = write_numbers_down
        self._functions = functions
        self._randoms = randoms
        self._graph = graph_being_traced()
        self._uniform = UniformDraws()
        self._twins = twins
        self._forward_lines: dict[int, tuple[str, str | None, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is asks_device and isinstance(args[0], FakeTensor):
            return device_of_fake(args[0])
        # Most of the Python that tracing runs is PyTorch's within an operator. Operators and tensor subclasses of the
        # user's may lead to their code.
        if getattr(func, "namespace", "") in _PYTORCHS and all(map(issubclass, types, repeat(FakeTensor))):
            # Itself, as in its place there is another: what the operator consists of is none of the function mode's.
            with DisableTorchFunction():
                return unseen(self._dispatch, func, args, kwargs or {})
        if is_expanded_later(func):  # its Python is called once more, and reads numbers as they are then
            self._write_numbers_down()
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_targets(func, args)
        self._check_switches(func, args)
        if func not in LIFTS:
            args, kwargs = self._fakes_in(args, kwargs)
        self._check_captured(func, args)
        last = next(iter(reversed(self._graph.nodes)))
        try:
            replacement = _REPLACEMENTS.get(func)
            if replacement is not None:
                return replacement(*args, **kwargs)
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                result = self._run_random(func, args, kwargs)
            elif (known := self._functions.values.computed(func, args, kwargs)) is not NotImplemented:
                return known
            elif (outcome := self._outcome(func, args)) is not None:
                return outcome
            else:
                result = func(*args, **kwargs)
            return self._followed(func, args, kwargs, result)
        except VALUE_NEEDED:
            self._fail_at(func)
        finally:
            self._note_line(last)
            if is_higher_order(func):
                self._check_bodies(func, last)

    def _check_captured(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse operators that are no part of a graph."""
        if getattr(func, "overloadpacket", None) is aten.set_:
            self._functions.fail_at_memory("set_")
        if getattr(func, "namespace", "") in _COLLECTIVES:
            self._fail(
                f"The step calls the collective {func.__name__}, which is not captured.",
                "Captured are torch.distributed.all_reduce and broadcast, by these names.",
            )
        if is_higher_order(func) and func.name() == "while_loop_stack_output":
            self._fail(
                "The step asks for gradients of a while_loop, which are as many as it turns.",
                "Use scan, whose length is known.",
            )
        devices = _devices_of(args) if is_higher_order(func) and func.name() in FLOWS else []
        if len(devices) > 1:
            self._fail(
                f"The step gives {func.name()} tensors on {' and '.join(devices)}.",
                "Make all of them on one device, its counters too.",
            )
        may_decide = all(device.startswith(("cpu", "cuda")) for device in devices)
        if is_higher_order(func) and func.name() not in (_HIGHER_ORDER | FLOWS if may_decide else _HIGHER_ORDER):
            self._fail(
                f"The step uses the higher-order operator {func.name()}, which is not captured.",
                "Use torch.where, or write out what it does.",
            )

    def _followed(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result of an operator, noted where its values are known."""
        self._uniform.see(operator, args, result, self._graph)
        if not self._functions.flows.is_inside:
            self._functions.values.see(operator, args, kwargs, result)
        return result

    def _check_bodies(self, operator: Any, last: fx.Node) -> None:
        """Refuse functions that are no part of the graph."""
        for node in reversed(self._graph.nodes):
            if node is last:
                return
            in_backward = running_sequence_number() is not None
            if node.target is operator and (why := why_not_a_body(node, root_being_traced(), in_backward=in_backward)):
                self._fail(
                    f"Functions that {operator.name()} is given {why}.",
                    "Draw random numbers before it, and pass it all that they use.",
                )

    def _outcome(self, operator: Any, args: tuple[Any, ...]) -> bool | None:
        """With which value the trace goes on, where the program asks a tensor for one; ``None`` where there is none."""
        if operator is not aten._local_scalar_dense.default:
            return None
        outcome = self._uniform.outcome(args[0])
        if outcome is None and self._functions.calling == "__bool__" and is_unknown(args[0]):
            outcome = self._choose(args[0])
        return outcome

    def _fakes_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An operator's arguments: with twins of the user's tensors, where it was called past the function mode."""
        real = [tensor for tensor in _tensors_in(_leaves((*args, *kwargs.values()))) if is_real(tensor)]
        for tensor in real:
            if not self._twins.holds(tensor):
                foreign = ForeignTensor(tensor, here())
                self._refuse(foreign)
                raise foreign
            # Autograd has seen the tensor and not its twin, which may have been given a gradient meanwhile.
            if torch.is_grad_enabled() and (tensor.requires_grad or self._twins.fake(tensor).requires_grad):
                self._fail(
                    "The step calls a function that no mode sees with a tensor that requires a gradient.",
                    "Pass it x.view_as(x) instead.",
                )
        return self._twins.given(args, kwargs) if real else (args, kwargs)

    def _run_random(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None:
            self._fail(
                "The step draws random numbers from a generator of its own.",
                "Use the default generator, seeded by torch.manual_seed.",
            )
        return self._randoms.run(operator, args, kwargs)

    def _fail_at(self, operator: Any) -> NoReturn:
        """Refuse an operator that needs a value."""
        reason = VALUE_READERS.get(self._functions.calling)
        self._functions.note_conversion()
        if operator in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            self._fail(reason or "The step reads a tensor's value.", READ_REMEDY)
        name = self._functions.calling or operator.__name__
        self._fail(f"The shape of a result depends on values ({name}: {operator}).", SHAPE_REMEDY)

    def _fail(self, reason: str, remedy: str) -> NoReturn:
        raise_refusal(self._refuse, reason, remedy)

    def _note_line(self, last: fx.Node) -> None:
        """Give the nodes after ``last`` the user's line; nodes of backward get that of their forward."""
        node = next(iter(reversed(self._graph.nodes)))
        if node is last:
            return
        sequence = running_sequence_number()
        if sequence is None:
            text, hint, module = describe(user_frames()), current_stream_hint(), module_path()
            self._forward_lines[next_sequence_number() - 1] = text, hint, module
        else:
            text, hint, module = self._forward_lines.get(sequence) or (describe(user_frames()), None, "")
        while node is not last:
            node.meta["stack_trace"] = text
            if module:
                node.meta["nn_module_stack"] = {module: (module, torch.nn.Module)}  # what FX keeps, by that name
            if hint is not None:
                note_stream_hint(node, hint)
            node.meta["in_backward"] = sequence is not None
            node = node.prev


def fits(new: Any, old: Tensor) -> bool:
    """Return whether ``new`` is a tensor that can be copied to ``old`` as it is."""
    return isinstance(new, Tensor) and new.shape == old.shape and new.dtype == old.dtype and new.device == old.device


def _leaves(values: Sequence[Any]) -> Sequence[Any]:
    """The values, and those in lists and tuples among them; here and below with few calls, each of which is watched."""
    if not any(map(isinstance, values, repeat((list, tuple)))):
        return values
    return [leaf for value in values for leaf in (_leaves(value) if isinstance(value, list | tuple) else (value,))]


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


def _devices_of(args: tuple[Any, ...]) -> list[str]:
    """Return where the operands of an operator are."""
    return sorted({str(each.device) for each in _tensors_in(_leaves(args))})


def _tensors_in(leaves: Sequence[Any]) -> Iterator[Tensor]:
    return compress(leaves, map(isinstance, leaves, repeat(Tensor)))


def _check_and_unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``aten::_amp_foreach_non_finite_check_and_unscale_`` in operators that compilers can fuse."""
    for grad in grads:
        is_bad = (~torch.isfinite(grad)).any().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, is_bad))
        grad.mul_(inv_scale)


def _update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """``aten::_amp_update_scale_`` in operators that compilers can fuse."""
    failed = found_inf != 0
    successes = growth_tracker + 1
    grows = successes == interval
    grown = scale * growth
    grown = torch.where(grows & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(failed, scale * backoff, grown))
    growth_tracker.copy_(torch.where(failed | grows, torch.zeros_like(successes), successes))
    return scale


_PYTORCHS = frozenset({"aten", "prims"})
"""Namespaces of operators that PyTorch alone implements."""

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators between processes."""

_HIGHER_ORDER = frozenset({"flex_attention", "flex_attention_backward"})
"""Operators with functions for arguments that TorchInductor compiles within a graph."""

_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    aten._amp_update_scale_.default: _update_scale,
}


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that an operator is given, and calls where nothing is recorded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with seen():
            return function(*args, **kwargs)

    return call
