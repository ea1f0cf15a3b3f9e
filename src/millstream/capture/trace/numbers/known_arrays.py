"""NumPy arrays that the host has before each replay, as tensors that the graph reads.

What ``np.random.permutation(n)`` gives is a ``KnownArray``, and so is what NumPy computes of it. An array that the user
keeps, or that the step makes, is itself; where PyTorch is given it, the graph reads what it holds in each call.

**Contract**
- A graph holds for arrays of one shape and dtype, whatever their values.
- A tensor that shares an array's memory in eager Python shows what the array held when the tensor was made: a step that
  writes to either afterwards is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.expressions import Always, Apply, Expression, kind_of
from millstream.capture.lines import raise_refusal
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.state.contents import MAX_BYTES
from millstream.capture.trace.numbers.arithmetic import expression_of, list_of, tuple_of
from millstream.capture.trace.numbers.numpy_arrays import DTYPES, LaterArray, calling, later_in
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import GraphScalar, is_number, is_scalar
from millstream.errors import CaptureError

_TO_TORCH = {dtype: own for own, dtype in DTYPES.items()}


class KnownArray(LaterArray):
    """An array that the host has before each replay.

    Args:
        value: The present one.
        of: Gives it from the numbers.
        questions: Receives what the program asks.
        device: Of the graph.
    """

    is_known = True

    def __init__(self, value: np.ndarray[Any, Any], of: Expression, questions: Questions, device: torch.device) -> None:
        super().__init__(of, frozenset(), value, questions)
        self.of, self.value, self.device = of, value, device
        self._tensors: dict[torch.device, Tensor] = {}
        self._items: dict[int, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        if type(key) is not int:
            return super().__getitem__(key)
        if key not in self._items:  # kept: PyTorch's index operator goes through the items, and holds no reference
            self._items[key] = super().__getitem__(key)
        return self._items[key]

    def _raise(self) -> None:
        raise_refusal(
            self._questions.refused.append,
            "The step does with an array of random numbers what a graph cannot.",
            "Make a tensor of it by torch.tensor(array, dtype=torch.float32), or draw with PyTorch's functions.",
        )

    def in_graph(self, device: torch.device) -> Tensor:
        """A tensor with its values on a device."""
        if device not in self._tensors:
            dtype = _TO_TORCH[self.value.dtype]
            self._tensors[device] = self._questions.read_array(self.of, self.value, dtype, device)
        return self._tensors[device]

    def item(self, *index: int) -> Any:
        return self._computed(np.ndarray.item, self, *index)

    def tolist(self) -> Any:
        return self._computed(np.ndarray.tolist, self)

    def __bool__(self) -> bool:
        return bool(self.item())  # which raises what eager Python does

    def _computed(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        parts = [*args, *how.values()]
        if not all(each.is_known for each in later_in(parts)):
            return super()._computed(function, *args, **how)
        function = calling(function, (*how,))
        value = unseen(function, *map(_value_of, parts))
        of = Apply(function, tuple(_expression(each, self._questions) for each in parts))
        if any(is_scalar(each) for each in later_in(parts)):  # of which the shape may be made
            kind = kind_of(value)
            self._questions.ask(Apply(kind_of, (of,)), lambda now: now == kind)
        made = known(value, of, self._questions, self.device)
        return self._refuse() if made is None else made


def known(value: Any, of: Expression, questions: Questions, device: torch.device) -> Any:
    """Return what a program gets for a value that the host has before each replay.

    ``None`` where nothing stands for it.

    Args:
        value: The present one: a number, an array, or a list or tuple of those.
        of: Gives it from the numbers.
        questions: Receives what the program asks.
        device: Of the graph.
    """
    if isinstance(value, bool | np.bool_):
        questions.ask(of, None if value else operator.not_)
        return value
    if is_number(value):
        return GraphScalar(value, of, questions, device)
    if _can_be_read(value):
        return KnownArray(value, of, questions, device)
    if type(value) in (list, tuple):
        items = enumerate(value)
        made = [known(each, Apply(operator.getitem, (of, Always(i))), questions, device) for i, each in items]
        return None if any(each is None for each in made) else type(value)(made)
    return None


def _can_be_read(value: Any) -> bool:
    return type(value) is np.ndarray and value.ndim > 0 and value.dtype in _TO_TORCH and value.nbytes <= MAX_BYTES


class ReadArrays:
    """Arrays that PyTorch is given while a step is traced.

    Args:
        questions: Of the trace.
        refuse: Raises where a graph cannot read an array.
    """

    def __init__(self, questions: Questions, refuse: Callable[[], NoReturn]) -> None:
        self._questions, self._refuse = questions, refuse
        self._read: dict[int, tuple[Any, KnownArray]] = {}  # by id, the user's
        self._shared: list[tuple[Any, bytes]] = []  # whose memory a tensor has in eager Python, and what they held

    def given(self, name: str, args: tuple[Any, ...], how: dict[str, Any]) -> Tensor:
        """Return what PyTorch's function of that name makes of an array."""
        if name not in _MAKING or not _are_arrays(args[:1]) or _are_arrays([*args[1:], *how.values()]):
            self._refuse()
        return self._tensor(name, *args, **how)

    def key(self, key: Any, device: torch.device) -> Any:
        """An index with tensors in the place of arrays, and of lists of numbers that change."""
        if type(key) is tuple:
            return tuple(self.key(each, device) for each in key)
        if type(key) is list and key and all(is_scalar(each) and each.is_known for each in key):
            of = Apply(_indices, (expression_of(key, self._questions),))
            key = KnownArray(_indices([each.value for each in key]), of, self._questions, device)
        return self._known(key).in_graph(device) if _are_arrays([key]) else key

    def check_unchanged(self) -> None:
        """Refuse that an array holds something else than when a tensor was given its memory."""
        if any(array.tobytes() != before for array, before in self._shared):
            raise writes_array()

    def _tensor(
        self, name: str, array: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **how: Any
    ) -> Tensor:
        if how:
            self._refuse()
        own = self._known(array).in_graph(torch.device("cpu"))
        device = own.device if name == "from_numpy" else torch.get_default_device() if device is None else device
        tensor = own.to(device, dtype or own.dtype, copy=name == "tensor")
        if tensor is own and type(array) is np.ndarray:
            self._shared.append((array, array.tobytes()))
        return tensor.requires_grad_() if requires_grad else tensor

    def _known(self, array: Any) -> KnownArray:
        if issubclass(type(array), KnownArray):
            return array  # type: ignore[no-any-return]
        if id(array) not in self._read:
            if not _can_be_read(array):
                self._refuse()
            of = self._questions.borrow(array)
            self._read[id(array)] = array, KnownArray(array, of, self._questions, torch.device("cpu"))
        return self._read[id(array)][1]


def writes_array() -> CaptureError:
    """Return what is raised where an array and a tensor would have to change together."""
    return CaptureError(
        "The step writes to a NumPy array whose memory a tensor has, or to that tensor.",
        remedy="Make the tensor by torch.tensor(array), which copies.",
    )


_MAKING = frozenset({"tensor", "as_tensor", "from_numpy"})
"""Functions that make a tensor of an array."""


def _indices(numbers: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(numbers)


def _are_arrays(values: Iterable[Any]) -> bool:
    """Return whether there is any array among them."""
    return any(issubclass(type(each), ARRAYS) for each in values)


ARRAYS = (np.ndarray, KnownArray)


def _value_of(part: Any) -> Any:
    if type(part) in (list, tuple):
        return type(part)(map(_value_of, part))
    return part.value if is_scalar(part) or issubclass(type(part), KnownArray) else part


def _expression(part: Any, questions: Questions) -> Expression:
    if type(part) in (list, tuple) and any(True for _ in later_in(part)):
        return Apply(list_of if type(part) is list else tuple_of, tuple(_expression(each, questions) for each in part))
    return part.of if issubclass(type(part), KnownArray) else expression_of(part, questions)
