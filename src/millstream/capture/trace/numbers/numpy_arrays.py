"""NumPy arrays of tensors' values, which are known after the graph, and what NumPy computes of them then.

``out.detach().cpu().numpy()`` gives a ``LaterArray``. It can be returned, appended, shown and given to callbacks, and
so can what is computed of it: NumPy does that after each replay.

**Contract**
- Only functions are written down whose results' shapes and dtypes are those that zeros in the place of the values give.
- What needs a value at once (a branch, an index, a write) is refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.capture.effects.expressions import Always, Apply, Expression
from millstream.capture.effects.late_values import Later, Leaf, SharedValue
from millstream.capture.lines import raise_refusal
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import Formatted, is_scalar

MOST_ITEMS = 4096
"""Of an array that becomes a list, or whose rows are gone through."""

_METHODS = frozenset(
    """
    all any argmax argmin argsort astype clip copy cumsum flatten max mean min prod ravel reshape round squeeze std sum
    swapaxes transpose var
    """.split()
)
_FUNCTIONS = frozenset(
    getattr(np, name)
    for name in """
    all any argmax argmin argsort around clip concatenate cumsum expand_dims hstack max mean min prod ravel reshape
    round sort squeeze stack std sum swapaxes transpose var vstack
    """.split()
)
DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
}
"""Of arrays, by those of tensors."""
_PLAIN = (bool, int, float, complex, str, type(None), np.generic, np.dtype, type, slice, type(...))


class LaterArray(Later):
    """An array, or a number of NumPy's, that is known after the graph.

    Args:
        of: Gives it from ``Values``.
        needs: What that reads of the graph's results.
        like: An array of zeros of its shape and dtype.
        questions: Receives what is refused.
    """

    is_known = False

    def __init__(self, of: Expression, needs: frozenset[Leaf], like: Any, questions: Questions) -> None:
        self.of, self.needs = SharedValue(of), needs
        self._like, self._questions = like, questions

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` finds, beside the type."""
        return type(self._like)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "size", "dtype", "nbytes", "itemsize"):
            return getattr(self._like, name)
        if name == "T":
            return self.transpose()
        if name in _METHODS:
            return functools.partial(self._computed, _method(name), self)
        if name.startswith("__") or not hasattr(self._like, name):
            raise AttributeError(f"'{type(self._like).__name__}' object has no attribute '{name}'")
        return self._refuse()

    def __len__(self) -> int:
        return len(self._like)

    def __iter__(self) -> Iterator[LaterArray]:
        if len(self) > MOST_ITEMS:
            self._refuse()
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if any(not each.is_known or each.dtype == bool for each in later_in([key]) if not is_scalar(each)):
            self._refuse()  # a mask gives an array of any size
        return self._computed(operator.getitem, self, key)

    def __neg__(self) -> Any:
        return self._computed(operator.neg, self)

    def __abs__(self) -> Any:
        return self._computed(abs, self)

    def __invert__(self) -> Any:
        return self._computed(operator.invert, self)

    def __round__(self, *digits: Any) -> Any:
        return self._computed(round, self, *digits)

    def scalar(self) -> Any:
        """A number of NumPy's in arithmetic with others; itself, if it is none."""
        is_number = isinstance(self._like, np.floating | np.integer)
        return self._number(self.of, self._like) if is_number else self

    def item(self, *index: int) -> HostScalar:
        """One number, as Python has it."""
        return self._number(Apply(_method("item"), (self.of, *map(Always, index))), self._like.item(*index))

    def tolist(self) -> Any:
        """The numbers, as Python has them."""
        if self.size > MOST_ITEMS:
            self._refuse()
        return self._numbers(SharedValue(Apply(_method("tolist"), (self.of,))), self._like.tolist())

    def _numbers(self, of: Expression, like: Any) -> Any:
        if not isinstance(like, list):
            return self._number(of, like)
        return [self._numbers(Apply(operator.getitem, (of, Always(index))), each) for index, each in enumerate(like)]

    def _number(self, of: Expression, like: Any) -> HostScalar:
        if isinstance(like, complex):
            self._refuse()
        host, origin = torch.device("cpu"), "a number of a NumPy array"
        is_whole = isinstance(like, int | np.integer)
        number = HostScalar(of, self._questions, host, self.needs, is_whole=is_whole, origin=origin)
        number.is_answer = isinstance(like, bool)
        return number

    def __repr__(self) -> str:
        return self.text_by(repr)

    def __str__(self) -> str:
        return self.text_by(str)

    def __format__(self, spec: str) -> str:
        return self.text_by(Formatted(spec))

    def text_by(self, make: Callable[[Any], str]) -> str:
        """Text that is made of it, which stands for itself until that is known."""
        return self._questions.text(Apply(make, (self.of,)), self.needs)

    def _computed(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Return what a function gives, some of whose arguments are known later."""
        parts = [*args, *how.values()]
        needs = frozenset[Leaf]().union(*(each.needs for each in later_in(parts)))
        like = unseen(_of_zeros, function, (*how,), [*map(_like, parts)])
        if "out" in how or not isinstance(like, np.ndarray | np.generic):
            self._refuse()
        operands = (_expression(each, self) for each in parts)
        return LaterArray(Apply(calling(function, (*how,)), tuple(operands)), needs, like, self._questions)

    def _convert(self) -> Any:
        self._questions.num_converted += 1  # a trace that sees ``float()`` might get on
        self._refuse()

    __float__ = __int__ = _convert

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        """Return what a function of NumPy's gives for each element."""
        if method != "__call__" or "out" in how or ufunc.nout > 1:
            self._refuse()
        return self._computed(ufunc, *inputs, **how)

    def __array_function__(self, function: Any, _: Any, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """Return what another function of NumPy's gives."""
        if function not in _FUNCTIONS or "out" in how:
            self._refuse()
        return self._computed(function, *args, **how)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        unseen(self._raise)

    def _raise(self) -> None:
        raise_refusal(
            self._questions.refused.append,
            "The step needs what a NumPy array holds that is known after the graph.",
            "Return, append or show the array, or let ms.callback take it; compute with tensors what the graph needs.",
        )

    __array__ = __bool__ = __index__ = __hash__ = __reduce_ex__ = _refuse  # type: ignore[assignment]
    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = __copy__ = __deepcopy__ = _refuse  # type: ignore[assignment]


def _operating(function: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[LaterArray, Any], Any]:
    """Make the method for an operator of two operands."""

    def method(self: LaterArray, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        return self._computed(function, other, self) if swapped else self._computed(function, self, other)

    return method


for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():
    _function = getattr(operator, _name)
    setattr(LaterArray, f"__{_name.rstrip('_')}__", _operating(_function, swapped=False))
    setattr(LaterArray, f"__r{_name.rstrip('_')}__", _operating(_function, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LaterArray, f"__{_name}__", _operating(getattr(operator, _name), swapped=False))


def array_of(tensor: Tensor, leaf: Leaf, questions: Questions) -> LaterArray | None:
    """The array of a tensor without values; ``None`` where NumPy would not take it.

    Args:
        tensor: What it has, or what that is a copy of.
        leaf: Gives a tensor with its values.
        questions: Of the trace.
    """
    if (dtype := DTYPES.get(tensor.dtype)) is None:
        return None
    like = unseen(np.broadcast_to, np.zeros((), dtype), tuple(tensor.shape))
    return LaterArray(Apply(_on_host, (leaf,)), frozenset((leaf,)), like, questions)


def _on_host(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def _of_zeros(function: Callable[..., Any], names: tuple[str, ...], parts: list[Any]) -> Any:
    with np.errstate(all="ignore"):
        return _called(function, names, *parts)


@functools.cache
def calling(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function whose last arguments have these names: one object for each, by which two traces are compared."""
    return functools.partial(_called, function, names) if names else function


def _called(function: Callable[..., Any], names: tuple[str, ...], *parts: Any) -> Any:
    first = len(parts) - len(names)
    return function(*parts[:first], **dict(zip(names, parts[first:], strict=True)))


def later_in(value: Any) -> Iterator[Any]:
    """Yield what stands for numbers and arrays among values, and in lists among these."""
    if type(value) in (list, tuple):
        for each in value:
            yield from later_in(each)
    elif issubclass(type(value), Later) or is_scalar(value):
        yield value


def _like(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_like, value))
    if is_scalar(value):
        return value.value if value.is_known else 1 if value.is_whole else 1.0
    return value._like if issubclass(type(value), LaterArray) else value


def _expression(value: Any, array: LaterArray) -> Expression:
    if type(value) in (list, tuple):
        return Apply(functools.partial(_made, type(value)), tuple(_expression(each, array) for each in value))
    if issubclass(type(value), Later) or is_scalar(value):
        return value.of  # type: ignore[no-any-return]
    if not isinstance(value, _PLAIN):
        array._refuse()
    return Always(value)


def _made(kind: type, *parts: Any) -> Any:
    return kind(parts)


@functools.cache
def _method(name: str) -> Callable[..., Any]:
    def call(array: Any, *args: Any, **how: Any) -> Any:
        return getattr(array, name)(*args, **how)

    return call
