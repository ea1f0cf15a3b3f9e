"""What a program is told that asks a tensor for its values: they are known after the replay, or in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from millstream._torch.tensors import FakeTensor, is_unknown, storage_id
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.trace.numbers.known_values import KnownValues
from millstream.capture.trace.numbers.numpy_arrays import LaterArray, array_of
from millstream.capture.trace.recorded_effects.checks import find_check
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.capture.trace.twins import Twins
from millstream.capture.trace.watches.flows import Flows

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

READ_REMEDY = (
    "Read it with .item(), whose value can be formatted, logged, stored and returned, or outside of the step; for a"
    " branch use torch.where."
)

MOST_READ = 256
"""Numbers that a step may read from tensors, of which each costs a node of the graph; ``tolist()`` reads its own."""

ANSWERED = frozenset({"item", "__repr__", "__format__", "tolist", "__bool__", "__deepcopy__"})
"""What is asked of a tensor that has no values, and can be had after the replay or in another way."""

_READ = frozenset({"item", "tolist", "__bool__"})


class AskedValues:
    """Answers what the program asks of tensors that have no values while it is traced.

    Args:
        mode: The function mode.
        twins: Those of the user's tensors.
        lifted: By id, tensors that are state.
        recorder: Of effects.
        flows: Whether functions of control flow are traced.
        values: What is known of tensors' values.
        fail: Refuses the step, with reason and remedy.
        has_sizes: Whether some sizes of arguments are symbols.

    Attributes:
        branches: Lines of those on values that the step has met; may be set, and grow, later.
    """

    def __init__(
        self,
        mode: TorchFunctionMode,
        twins: Twins,
        lifted: set[int],
        recorder: EffectRecorder,
        flows: Flows,
        values: KnownValues,
        fail: Callable[[str, str], NoReturn],
        *,
        has_sizes: bool,
    ) -> None:
        self.branches: Sequence[str] = ()
        self._mode = mode
        self._twins = twins
        self._lifted = lifted
        self._recorder = recorder
        self._flows = flows
        self._values = values
        self._fail = fail
        self._has_sizes = has_sizes
        self._on_host: dict[int, tuple[Tensor, Tensor]] = {}  # by id, copies on the host, and of what

    def answer(self, name: str, given: Any, tensor: Tensor, *how: Any) -> Any:
        """Return what can be said of a tensor without values; ``NotImplemented`` if that is for PyTorch to say."""
        if self._flows.is_inside and name in VALUE_READERS:
            self._fail("A function that control flow is given reads a tensor's value.", READ_REMEDY)
        is_read = name in _READ and not (name == "item" and self.branches)  # what is read there may be another way's
        if is_read and (value := unseen(self._values.read, tensor, name)) is not NotImplemented:
            return value
        if name == "tolist":
            with self._mode:  # which sees each number
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

    def array(self, given: Any, tensor: Tensor, *, force: bool = False) -> LaterArray | None:
        """The array of a tensor's values; ``None`` where eager PyTorch gives none, or one of the user's own memory."""
        if force:
            tensor = tensor.detach().cpu()
        is_state = id(given) in self._lifted or storage_id(tensor) in self._memory_of_state
        is_seen = is_state or self._flows.is_inside
        if tensor.requires_grad or tensor.device.type != "cpu" or is_seen or self._has_sizes:
            return None
        inputs = (each.tensor for each in self._recorder.questions.inputs)
        is_argument = any(storage_id(tensor) == storage_id(each) for each in (*self._twins.fakes, *inputs))
        _, source = self._on_host.get(id(tensor), (None, None))
        if source is not None:  # which a graph on its device gives: the host copies it, after the graph
            tensor = source
        leaf = self._recorder.array(tensor.detach().clone() if is_argument or source is not None else tensor)
        return array_of(tensor, leaf, self._recorder.questions)

    def note_move(self, given: Any, result: Any) -> None:
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

    def note_conversion(self, calling: str) -> None:
        """A tensor whose value is not known is asked for it: a trace that sees ``float()`` might get on."""
        self._recorder.questions.num_converted += calling in ("__float__", "__int__")


def _repr_as(traced: Tensor, *, is_named: bool) -> Callable[[Tensor], str]:
    """Return how to show a tensor whose values are there as one that autograd knows."""
    node = traced.grad_fn
    before = "Parameter containing:\n" if isinstance(traced, nn.Parameter) and not is_named else ""
    if node is None and not traced.requires_grad:
        return lambda value: before + repr(value)
    shown = "requires_grad=True" if node is None else f"grad_fn=<{type(node).__name__}>"
    return lambda value: before + repr(value.detach().requires_grad_()).replace("requires_grad=True", shown)
