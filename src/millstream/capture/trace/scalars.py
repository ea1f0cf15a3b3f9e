"""Python numbers that a captured graph reads at run time, or that the host reads from its results.

While tracing, a ``GraphScalar`` stands where a learning rate, a counted step or a number of the user's stood.
Arithmetic with it becomes part of the graph; a comparison is answered with the present value and remembered, because
another answer needs another graph; whoever takes it for a plain ``float`` gets one, which is remembered as well. A
``HostScalar`` stands for what ``.item()`` gives: nobody knows its value yet, so that only arithmetic and text can be
made of it.

They stand in the very objects that have the numbers, where other threads meet them, too. To everybody but the thread
that traces, and to that after the trace, they are the plain numbers: nothing is asked, and nothing becomes part of the
graph.

**Contract**
- A graph depends on the value of a number only through its tensor and through the questions in ``Questions``.
- Like a Python number, and unlike a tensor, a scalar never changes the dtype of a floating-point result; nor does a
  whole number that of another whole number.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from millstream.capture.effects.values import Always, Expression, Leaf, Texts, holds_token
from millstream.capture.lines import here, raise_refusal, stopped_at, stops_in_debugger
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.location import MISSING
from millstream.capture.state.signature import is_other
from millstream.errors import CaptureError
from millstream.heap import objects_of_types

Numbers: TypeAlias = Sequence[float]
"""Values of all numbers that a graph reads, in the order in which they were lifted."""


LOOKAHEAD = 1000
"""Calls: what an optimizer does every so often it does within so many."""

MOST_EXACT = 2**53
"""Whole numbers up to this size are floats without rounding, and so are they in the graph."""


@dataclass(slots=True)
class Questions:
    """What the traced program asked about the values of its numbers."""

    asked: list[tuple[Callable[[Numbers], Any], Any]] = field(default_factory=list)  # questions and the answers
    refused: list[CaptureError] = field(default_factory=list)  # what it asked of values that nobody knows yet
    texts: Texts = field(default_factory=Texts)  # text made of them
    thread: int | None = field(default_factory=threading.get_ident)  # that traces; ``None`` after the trace
    # gives what was there before the program put a number that nobody knows yet there; ``MISSING`` where it did not
    before: Callable[[Any], Any] = lambda number: MISSING

    def text(self, of: Expression, needs: frozenset[Leaf]) -> str:
        """Text that stands for what ``of`` will give, from what ``needs`` says; not for a debugger to show."""
        if (where := stopped_at()) is not None:
            self.refused.append(stops_in_debugger(where))
            raise self.refused[-1]
        return self.texts.token(of, needs, here())

    def allow(self, numbers: Numbers) -> bool:
        """Whether a program with these numbers would get the same answers, so that the graph holds for it."""
        for ask, answer in self.asked:  # a generator would take twice the time
            found = ask(numbers)
            if found is not answer and is_other(found, answer):
                return False
        return True

    def allow_again(self, numbers: Numbers, successors: dict[int, Callable[[Numbers], Any]]) -> bool:
        """Whether the graph will hold once more, if nobody but the program changes its numbers.

        Args:
            numbers: As they are now.
            successors: By position, what the program makes of those that it changes.
        """
        with contextlib.suppress(ArithmeticError, ValueError):  # where the program would raise as well
            for _ in range(LOOKAHEAD):
                numbers = [successors[i](numbers) if i in successors else each for i, each in enumerate(numbers)]
                if self.allow(numbers):
                    return True
        return False


class GraphScalar(torch.SymFloat):
    """A number with a value known now and a tensor that holds it at run time.

    It is a ``SymFloat`` only in order that PyTorch's argument parser lets it pass to the tracer's function mode, which
    replaces it.

    Args:
        value: The present value.
        tensor: A 0-d float64 tensor that the graph reads.
        of: The same value from the lifted numbers.
        questions: Receives what the program asks.
        is_users: Whether it is a number of the user's, which may be whole in one call and not in the next.

    Attributes:
        parts: What it was computed from.
        casts: Its tensor in other dtypes.
    """

    is_known = True
    needs: frozenset[Leaf] = frozenset()
    origin = ""

    def __init__(
        self, value: Any, tensor: Tensor | None, of: Expression, questions: Questions, *, is_users: bool = False
    ) -> None:
        self.value = value
        self.tensor = tensor
        self.of = of
        self.questions = questions
        self.is_users = is_users
        self.parts: Sequence[GraphScalar] = ()
        self.casts: dict[torch.dtype, Tensor] = {}
        # With each parameter an optimizer computes the same of the one number of its steps: the graph does it once.
        self._known: dict[tuple[Any, ...], tuple[Any, GraphScalar]] = {}
        self._asked: dict[tuple[Any, ...], Any] = {}

    @property
    def is_asked_by_others(self) -> bool:
        """Whether anybody but the traced program is at work: another thread, or who has kept it beyond the trace."""
        return threading.get_ident() != self.questions.thread

    def outside(self) -> Any:
        """What it is to others: what was there before, as if the step had not run yet."""
        number = self.questions.before(self)
        if number is MISSING:
            return self.value
        return number.value if is_scalar(number) else number

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` finds, beside the type: programs ask whether they were given a number."""
        return int if self.is_whole else float

    @property
    def is_whole(self) -> bool:
        """Whether the number is an integer, and not one by chance."""
        answer = isinstance(self.value, int | np.integer)
        if self.is_users and not self.is_asked_by_others:
            of = self.of
            self._ask((GraphScalar,), None, lambda numbers: isinstance(of(numbers), int | np.integer), answer)
        return answer

    def as_tensor_for(self, other: Tensor | None) -> Tensor:
        """The tensor in the dtype in which a Python number takes part in an operation with ``other``."""
        if other is not None and other.dtype in (torch.float64, torch.complex128):
            dtype = torch.float64
        elif other is not None and (other.is_floating_point() or other.is_complex()):
            dtype = torch.float32
        else:
            dtype = torch.int64 if self.is_whole else torch.get_default_dtype()
        return self.in_dtype(dtype)

    def in_dtype(self, dtype: torch.dtype) -> Tensor:
        """The tensor in another dtype; a constant where the graph would have rounded a whole number."""
        if dtype not in self.casts:
            tensor = self.in_graph()
            is_right = dtype != torch.int64 or self.is_exact
            self.casts[dtype] = (
                tensor.to(dtype) if is_right else torch.full((), self.plain(), dtype=dtype, device=tensor.device)
            )
        return self.casts[dtype]

    @property
    def is_exact(self) -> bool:
        """Whether no whole number is rounded in the graph: neither this one nor any that it was computed from."""
        if not self.is_known:
            return True
        of, answer = self.of, _is_exact(self.value)
        self._ask((_is_exact,), None, lambda numbers: _is_exact(of(numbers)), answer)
        return answer and all(part.is_exact for part in self.parts)

    def in_graph(self) -> Tensor:
        """The tensor that holds it at run time."""
        assert self.tensor is not None
        return self.tensor

    def plain(self) -> int | float:
        """The present value, on which the graph depends from here on."""
        if self.is_asked_by_others:
            return self.outside()  # type: ignore[no-any-return]
        self._ask((), None, self.of, self.value)
        return int(self.value) if self.is_whole else float(self.value)  # NumPy's are of other types

    def __float__(self) -> float:
        return float(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())  # type: ignore[arg-type] # raises what a float raises

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(float(self))

    def __getattr__(self, name: str) -> Any:
        """What numbers have besides: ``bit_length()``, ``real``."""
        number = self.outside() if self.is_asked_by_others else self.value
        if name == "node":  # PyTorch, which would compute with what it does not know
            if self.is_asked_by_others:
                raise CaptureError(
                    "PyTorch was given a number of a step that another thread captures just now.",
                    where=here(),
                    remedy="Give it int(number) or float(number).",
                )
            raise_refusal(
                self.questions.refused.append,
                "PyTorch was given a number that changes where it takes none.",
                HOST_REMEDY if self.needs else "Give it int(number) or float(number): each value has a graph then.",
            )
        if name.startswith("__") or not hasattr(number, name):
            raise AttributeError(f"'{type(number).__name__}' object has no attribute '{name}'")
        return getattr(self.plain(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.plain(), dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        number = self.plain()
        return type(number), (number,)

    def __copy__(self) -> Any:
        return self.plain() if self.is_asked_by_others else self

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function of PyTorch's that takes it in a tensor's place."""
        return run_with_scalars(func, args, kwargs or {})

    def __repr__(self) -> str:
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def __format__(self, spec: str) -> str:
        if holds_token(spec):
            raise_refusal(
                self.questions.refused.append,
                "The step formats a number by another one that changes.",
                "Let ms.callback format it, as in ms.callback(show, value, digits).",
            )
        if self.is_known and not self.is_asked_by_others:
            format(self.value, spec)  # for its error
        return self._text(lambda value: format(value, spec))

    def _text(self, make: Callable[[Any], str]) -> str:
        if self.is_asked_by_others:
            return make(self.outside())
        of = self.of
        return self.questions.text(lambda values: make(of(values)), self.needs)

    def __round__(self, digits: int | None = None) -> Any:
        return self.apply(
            lambda value: round(value, digits),
            lambda tensor: torch.round(tensor, decimals=digits or 0),
            what=(round, digits),
            is_whole=self.is_whole if digits is not None else True,
        )

    def __neg__(self) -> Any:
        return self.apply(operator.neg, is_whole=self.is_whole)

    def __pos__(self) -> Any:
        return self.plain() if self.is_asked_by_others else self

    def __abs__(self) -> Any:
        return self.apply(abs, is_whole=self.is_whole)

    def apply(
        self,
        function: Callable[[Any], Any],
        to_tensor: Callable[[Tensor], Tensor] | None = None,
        *,
        what: tuple[Any, ...] = (),
        is_whole: bool = False,
    ) -> Any:
        """A function of the number, its form for tensors if that is another, and what kind of number it gives."""
        if self.is_asked_by_others:
            return function(self.outside())
        of, tensor = self.of, self.tensor
        return self._once(
            what or (function,),
            None,
            lambda: self._make(
                function(self.value) if self.is_known else None,
                None if tensor is None else (to_tensor or function)(tensor),
                lambda numbers: function(of(numbers)),
                is_whole=is_whole,
            ),
        )

    def _make(
        self, value: Any, tensor: Tensor | None, of: Expression, *, other: Any = None, is_whole: bool = False
    ) -> GraphScalar:
        """What was computed from the number, and maybe from another."""
        parts = [part for part in (self, other) if is_scalar(part)]
        unknown = next((part for part in parts if not part.is_known), None)
        if unknown is None:
            made = GraphScalar(value, tensor, of, self.questions, is_users=any(part.is_users for part in parts))
            made.parts = parts
            return made
        needs = frozenset[Leaf]().union(*(part.needs for part in parts))
        return HostScalar(tensor, of, self.questions, needs, is_whole=is_whole, origin=unknown.origin)

    def refuse(self, what: str) -> NoReturn:
        """Raise that the step does something for which a value must be known that is not; told also if swallowed."""
        remedy = HOST_REMEDY if self.needs else "Do that outside of the step, after it."
        raise_refusal(self.questions.refused.append, f"{what} {self.origin}.", remedy)

    def _once(self, what: tuple[Any, ...], other: Any, compute: Callable[[], GraphScalar]) -> GraphScalar:
        key = _key_of(what, other)
        if key not in self._known:
            self._known[key] = other, compute()  # the other lives as long: its id stays its own
        return self._known[key][1]

    def _ask(self, what: tuple[Any, ...], other: Any, of: Callable[[Numbers], Any], answer: Any) -> None:
        """Remember a question, once."""
        if self.is_asked_by_others:
            return
        key = _key_of(what, other)
        if key not in self._asked:
            self._asked[key] = other
            self.questions.asked.append((of, answer))


class HostScalar(GraphScalar):
    """A number that the host knows only after the graph has run.

    Args:
        tensor: A 0-d float64 tensor with it, ``None`` if the graph cannot have it.
        of: Gives it from ``Values``.
        questions: Receives what the program asks, which is refused.
        needs: What ``of`` reads of the graph's results.
        is_whole: Whether it is an integer.
        origin: Where it comes from, for people.
    """

    is_known = False

    def __init__(
        self,
        tensor: Tensor | None,
        of: Expression,
        questions: Questions,
        needs: frozenset[Leaf],
        *,
        is_whole: bool,
        origin: str,
    ) -> None:
        super().__init__(None, tensor, of, questions)
        self.needs = needs
        self.origin = origin
        self._is_whole = is_whole

    @property
    def is_whole(self) -> bool:
        return isinstance(self.outside(), int | np.integer) if self.is_asked_by_others else self._is_whole

    def outside(self) -> Any:
        """What was there before: for others the call that brings this number has not ended."""
        number = self.questions.before(self)
        if number is MISSING:
            raise CaptureError(
                "This number is known only after the call of a step that captures it in another thread.",
                where=here(),
                remedy="Read it again after that call.",
            )
        return number.outside() if is_scalar(number) else number

    def in_graph(self) -> Tensor:
        if self.tensor is None:
            self.refuse("The step computes with")
        return self.tensor

    def plain(self) -> Any:
        if self.is_asked_by_others:
            return self.outside()
        return self.refuse("The step makes a plain number of")


HOST_REMEDY = (
    "Its value is known after the step: format it with f-strings, log it, return it; for a branch use torch.where, or"
    " decide in ms.callback(function, value)."
)


def is_scalar(value: Any) -> TypeGuard[GraphScalar]:
    """Whether it is a scalar of a graph; unlike ``isinstance``, asks it nothing."""
    return issubclass(type(value), GraphScalar)


def is_size(value: Any) -> bool:
    """The same of numbers that are computed from sizes, which each call brings anew."""
    return issubclass(type(value), (torch.SymInt, torch.SymFloat)) and not is_scalar(value)


def is_known_later(value: Any) -> bool:
    """Whether it stands for a number that each call brings, or is text with one in it."""
    return is_scalar(value) or is_size(value) or (isinstance(value, str) and holds_token(value))


def as_scalar(value: Any) -> Any:
    """A number that is computed from sizes as one that the host knows after a replay; anything else as it is."""
    return value.scalar() if is_size(value) else value


_NUMBERS = (int, float, np.floating, np.integer)


def is_number(value: Any) -> bool:
    """Whether a graph can read ``value`` at run time: a real number, of NumPy too (schedulers), and no ``bool``.

    While tracing, a graph's scalar is one.
    """
    kind = type(value)
    if kind is float or kind is int:  # asked in each call with a number that changes
        return True
    return is_scalar(value) or (isinstance(value, _NUMBERS) and not isinstance(value, bool))


def is_tensor(value: Any) -> bool:
    """The same of tensors."""
    return issubclass(type(value), Tensor)


def is_whole(number: Any) -> bool:
    """Whether a number, or what a scalar stands for, is an integer."""
    return bool(number.is_whole) if is_scalar(number) else isinstance(number, int | np.integer)


def _is_exact(number: Any) -> bool:
    return not isinstance(number, int | np.integer) or abs(int(number)) <= MOST_EXACT


def _key_of(what: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
    return *what, type(other), id(other) if is_scalar(other) else other


def _parts_of(other: Any) -> tuple[Any, Any, Expression]:
    """Of a scalar or a plain number: its value, what stands for it in the graph, and how numbers give it."""
    return (other.value, other.tensor, other.of) if is_scalar(other) else (other, other, Always(other))


def _gives_whole(function: Callable[..., Any], left: GraphScalar, right: Any) -> bool:
    """Whether an operator gives an integer."""
    if function is operator.truediv or not left.is_whole:
        return False
    return right.is_whole if is_scalar(right) else isinstance(right, int)


def _combining(function: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[GraphScalar, Any], Any]:
    """Make the method for an arithmetic operator."""

    def combine(left: Any, right: Any) -> Any:
        return function(right, left) if swapped else function(left, right)

    def method(self: GraphScalar, other: Any) -> Any:
        if self.is_asked_by_others:
            return combine(self.outside(), other)
        if is_tensor(other):
            return combine(self.as_tensor_for(other), other)
        own, other = self.of, as_scalar(other)
        if not (is_scalar(other) or isinstance(other, int | float)):
            return NotImplemented
        value, tensor, of = _parts_of(other)
        is_known = self.is_known and (not is_scalar(other) or other.is_known)

        def compute() -> GraphScalar:
            return self._make(
                combine(self.value, value) if is_known else None,
                None if self.tensor is None or tensor is None else combine(self.tensor, tensor),
                lambda numbers: combine(own(numbers), of(numbers)),
                other=other,
                is_whole=not is_known and _gives_whole(function, self, other),
            )

        return self._once((function, swapped), other, compute)

    return method


def _comparing(function: Callable[[Any, Any], Any]) -> Callable[[GraphScalar, Any], Any]:
    """Make the method for a comparison."""

    def method(self: GraphScalar, other: Any) -> Any:
        if self.is_asked_by_others:
            return function(self.outside(), other)
        if is_tensor(other):
            return function(self.as_tensor_for(other), other)
        own, other = self.of, as_scalar(other)
        if not (is_scalar(other) or isinstance(other, int | float)):
            return NotImplemented
        for part in (self, other):
            if is_scalar(part) and not part.is_known:
                part.refuse("The step branches on")
        value, _, of = _parts_of(other)
        answer = bool(function(self.value, value))
        self._ask((function,), other, lambda numbers: bool(function(own(numbers), of(numbers))), answer)
        return answer

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(GraphScalar, f"__{_name}__", _combining(_function, swapped=False))
    setattr(GraphScalar, f"__r{_name}__", _combining(_function, swapped=True))
setattr(GraphScalar, "__int__", lambda self: int(float(self)))  # noqa: B010 - the parent class declares that it raises
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(GraphScalar, f"__{_name}__", _comparing(getattr(operator, _name)))


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method for what needs the plain number."""
    return lambda self, *others: function(self.plain(), *others)


for _name in ("lshift", "rshift", "and", "or", "xor"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(GraphScalar, f"__{_name}__", _of_plain(_function))
    setattr(GraphScalar, f"__r{_name}__", _of_plain(lambda own, other, function=_function: function(other, own)))
for _name, _function in {
    "divmod": divmod,
    "rdivmod": lambda own, other: divmod(other, own),
    "invert": operator.invert,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "complex": complex,
}.items():
    setattr(GraphScalar, f"__{_name}__", _of_plain(_function))
for _name in ("is_integer", "as_integer_ratio", "conjugate", "hex"):  # which the parent class has
    setattr(GraphScalar, _name, _of_plain(lambda number, name=_name: getattr(number, name)()))


def _refusing(name: str, what: str) -> Callable[[HostScalar], Any]:
    """Make the method for what needs a value."""
    function = getattr(operator, name) if name == "index" else getattr(builtins, name)
    return lambda self: function(self.outside()) if self.is_asked_by_others else self.refuse(what)


for _name, _what in {
    "float": "The step makes a float of",
    "int": "The step makes an int of",
    "index": "The step indexes with",
    "bool": "The step branches on",
    "hash": "The step looks something up by",
}.items():
    setattr(HostScalar, f"__{_name}__", _refusing(_name, _what))


_TAKE_TENSORS = frozenset(
    """
    add radd sub subtract rsub mul multiply rmul div divide true_divide rdiv rtruediv pow rpow float_power remainder
    fmod floor_divide rfloordiv eq ne lt le gt ge clamp clamp_min clamp_max fill where copysign atan2 hypot
    broadcast_tensors gumbel_softmax
    """.split()
)
"""Functions that compute with a 0-d tensor given for a number. Most others take one as well, but read its value."""


def run_with_scalars(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a PyTorch function, some of whose arguments are graph scalars, in a form that takes tensors for them."""
    if any(is_scalar(value) and value.is_asked_by_others for value in (*args, *kwargs.values())):
        return function(*map(_plain_of, args), **{key: _plain_of(value) for key, value in kwargs.items()})
    name = getattr(function, "__name__", "")
    if name.startswith("_foreach_"):
        return _run_foreach(name.removeprefix("_foreach_"), function, args, kwargs)
    plain = name.rstrip("_")
    if plain in ("add", "sub", "subtract") and is_scalar(kwargs.get("alpha")):
        alpha = kwargs["alpha"]
        rest = {key: value for key, value in kwargs.items() if key != "alpha"}
        return function(args[0], _times(args[1], alpha), *args[2:], **rest)
    if plain in ("addcmul", "addcdiv") and (scalar := _scalar_at(args, kwargs, 3, "value")) is not None:
        return function(args[0], _times(args[1], scalar), args[2])
    if plain == "lerp" and (scalar := _scalar_at(args, kwargs, 2, "weight")) is not None:
        moved = args[0] + (args[1] - args[0]) * scalar.as_tensor_for(args[0])
        return args[0].copy_(moved) if name.endswith("_") else moved
    if plain in _FILL:
        return _fill(plain, function, args, kwargs)
    like = next((arg for arg in args if is_tensor(arg)), None)

    def as_tensor(value: Any) -> Any:
        return value.as_tensor_for(like) if is_scalar(value) else value

    if plain.strip("_") in _TAKE_TENSORS:
        try:
            return function(*map(as_tensor, args), **{key: as_tensor(value) for key, value in kwargs.items()})
        except TypeError:  # not in this combination
            pass
    if function in (torch.tensor, torch.as_tensor) and args and _are_at(kwargs.get("device"), tree_leaves(args[0])):
        return _new_tensor(*args, **kwargs)
    # Takes numbers only: the graph then belongs to this value, which is written down.
    return function(*map(_plain_of, args), **{key: _plain_of(value) for key, value in kwargs.items()})


_FILL = {"masked_fill": 2, "index_fill": 3, "__setitem": 2, "full": 1, "full_like": 1, "new_full": 2}
"""By function, which of its arguments the elements of a tensor become."""


def _fill(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give elements of a tensor a number."""
    at = _FILL[name]
    number = args[at] if len(args) > at else next(kwargs.pop(key) for key in ("value", "fill_value") if key in kwargs)
    args, kwargs = _plain_of(args[:at]), {key: _plain_of(value) for key, value in kwargs.items()}
    if not is_scalar(number):
        return function(*args, number, **kwargs)
    if "full" in name:
        made = function(*args, 0 if number.is_whole else 0.0, **kwargs)
        with torch.no_grad():  # it may be a leaf that requires a gradient
            return made.fill_(_element(number, made))
    return function(*args, _element(number, args[0]), **kwargs)


def _element(number: GraphScalar, of: Tensor) -> Any:
    """A number as an element of a tensor; its plain value where PyTorch checks whether there is room for it."""
    takes_all = of.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
    if number.in_graph().device == of.device and (takes_all or (of.dtype == torch.int64 and number.is_whole)):
        return number.in_dtype(of.dtype)
    return number.plain()


def _are_at(device: Any, parts: Sequence[Any]) -> bool:
    """Whether these are numbers that the graph has on a device; ``None``: that of new tensors.

    Those of an optimizer are where its parameters are. To bring them to the host a graph would have to wait.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return all(each.in_graph().device == device if is_scalar(each) else type(each) in (int, float) for each in parts)


def _new_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **how: Any) -> Tensor:
    """``torch.tensor`` of numbers, in lists or not, some of which change."""
    if dtype is None:
        dtype = torch.int64 if all(map(is_whole, tree_leaves(data))) else torch.get_default_dtype()

    def made(part: Any) -> Tensor:
        if isinstance(part, list | tuple):
            return torch.stack([*map(made, part)])
        if is_scalar(part):
            return part.in_dtype(dtype).clone()
        return torch.tensor(part, dtype=dtype, device=device)

    return made(data).requires_grad_(how.get("requires_grad", False))


def _plain_of(value: Any) -> Any:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(_plain_of, value))
    return value.plain() if is_scalar(value) else value


def give_back(questions: Questions) -> None:
    """After a trace, put numbers where other threads have kept what stood for them: ``log.append(trainer.count)``."""
    questions.thread = None
    if not others_may_write():
        return
    kept = [each for each in objects_of_types([GraphScalar, HostScalar]) if each.questions is questions]
    for holder in gc.get_referrers(*kept) if kept else ():
        if holder is kept:
            continue
        if not issubclass(type(holder), dict | list | deque):
            with contextlib.suppress(AttributeError):  # a proxy's ``__getattr__`` would lead to another object
                holder = object.__getattribute__(holder, "__dict__")
        # Methods of subclasses are the user's: ``__missing__`` would bring back what was removed.
        kind: Any = next((kind for kind in (dict, list, deque) if issubclass(type(holder), kind)), None)
        if kind is None:
            continue
        get = dict.get if kind is dict else kind.__getitem__
        for key, value in [*(dict.items(holder) if kind is dict else enumerate(kind.__iter__(holder)))]:
            if is_scalar(value) and value.questions is questions:
                with contextlib.suppress(CaptureError, LookupError):  # there was none before; it has gone by now
                    plain = value.plain()
                    if get(holder, key) is value:
                        kind.__setitem__(holder, key, plain)


def _times(value: Any, scalar: GraphScalar) -> Any:
    return value * scalar.as_tensor_for(value) if is_tensor(value) else value * scalar


def _tensor_of(value: Any, like: Tensor) -> Tensor:
    if is_scalar(value):
        return value.as_tensor_for(like)
    return value if is_tensor(value) else torch.full((), value, dtype=like.dtype, device=like.device)


def _scalar_at(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> GraphScalar | None:
    value = kwargs.get(name, args[position] if len(args) > position else None)
    return value if is_scalar(value) else None


def _run_foreach(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forms with lists of tensors stay one foreach operator, which compilers fuse over the whole list."""
    plain = name.rstrip("_")
    if is_scalar(args[0]):  # number ** tensors
        return [getattr(torch, plain)(args[0].as_tensor_for(tensor), tensor) for tensor in args[1]]
    tensors = list(args[0])

    def spread(scalar: GraphScalar) -> list[Tensor]:
        return [scalar.as_tensor_for(tensor) for tensor in tensors]

    def replaced(value: Any) -> Any:
        if is_scalar(value):
            return spread(value)
        if isinstance(value, list | tuple) and any(is_scalar(item) for item in value):
            return [_tensor_of(item, like) for item, like in zip(value, tensors, strict=True)]
        return value

    if plain in ("add", "sub") and is_scalar(kwargs.get("alpha")):
        return function(tensors, torch._foreach_mul(args[1], spread(kwargs["alpha"])))
    if plain in ("addcmul", "addcdiv"):
        factor = kwargs.get("value", kwargs.get("scalars", args[3] if len(args) > 3 else 1))
        return function(tensors, torch._foreach_mul(args[1], replaced(factor)), args[2])
    if plain == "lerp" and (scalar := _scalar_at(args, kwargs, 2, "weight")) is not None:
        moves = torch._foreach_mul(torch._foreach_sub(args[1], tensors), spread(scalar))
        return (torch._foreach_add_ if name.endswith("_") else torch._foreach_add)(tensors, moves)

    return function(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})
