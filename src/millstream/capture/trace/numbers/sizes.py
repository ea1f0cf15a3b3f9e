"""Stand-ins, while a program is traced, for sizes that each call brings anew.

PyTorch's symbolic numbers do for tensors: as arguments of operators they become nodes of the graph, and what is decided
about them a guard. Python sees the difference. So what the user's code reads of a shape passes for ``int`` there, and
where it leaves the step (text, logs, results, attributes) it becomes a number that the host computes after each replay.

**Contract**
- Arithmetic costs no guard; a comparison guards its outcome; whoever takes an ``int`` fixes the size, at a known line.
- To PyTorch's own code it is a symbolic number, as if it had been read there.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from millstream._torch.compiler.symbols import (
    FakeTensorMode,
    compile_expressions,
    definition_of,
    expression_of,
    fake_with_symbols,
    is_constant,
    line_of_decision,
    mode_for_sizes,
)
from millstream.capture.lines import here, is_ours, is_pythons
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import is_scalar
from millstream.capture.trace.numbers.whole_numbers import USUAL

GIVE_SIZES = frozenset({"stride", "__len__"})
"""What gives sizes of a tensor that are not told from other results by their type."""

ARE_SIZES = frozenset({torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool})
"""Types of what gives sizes otherwise: ``shape``, ``numel()``, ``nbytes`` and so on."""

MOST_ELEMENTS = 2**48
"""No size is larger."""


def _is_asked_by_pytorch(frame: FrameType | None) -> bool:
    while frame is not None and is_pythons(frame.f_code.co_filename):  # ``abc`` asks for others
        frame = frame.f_back
    return frame is None or is_ours(frame.f_code.co_filename)


class TracedSizes:
    """Sizes of the arguments of one trace.

    Args:
        arguments: The tensors.
        dimensions: By position, which of their dimensions each call brings anew.
        questions: Of the trace.
        first: Where ``Values`` have the sizes.
        device: Of the graph.

    Attributes:
        mode: Of the trace.
        fakes: Stand for the arguments.
        shapes: Sizes and strides of each argument.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        dimensions: dict[int, frozenset[int]],
        questions: Questions,
        first: int,
        device: torch.device,
    ) -> None:
        self.mode: FakeTensorMode = mode_for_sizes()
        self.dimensions = dimensions
        self.fakes = [
            fake_with_symbols(self.mode, argument, dimensions.get(position, frozenset()), position)
            for position, argument in enumerate(arguments)
        ]
        self.shapes = [(*fake.shape, *fake.stride()) for fake in self.fakes]
        self._questions, self._device = questions, device
        self._lines: dict[Any, str] = {}
        self._scalars: dict[Any, HostScalar] = {}
        # Each symbol by itself, and not by what it was found to equal.
        numbers = [number for shape in self.shapes for number in shape]
        named = {definition_of(number): first + at for at, number in enumerate(numbers) if not is_constant(number)}
        self._index_of = {symbol: index for symbol, index in named.items() if symbol.is_Symbol}
        self._symbols = {
            (position, dimension): definition_of(fake.shape[dimension])
            for position, fake in enumerate(self.fakes)
            for dimension in dimensions.get(position, ())
            if not is_constant(fake.shape[dimension])
        }

    def fixed(self) -> dict[tuple[int, int], str]:
        """Dimensions that the program took for plain numbers, by argument and dimension, and the lines where it did."""
        return {
            place: self._lines.get(symbol) or self._line_of(symbol)
            for place, symbol in self._symbols.items()
            if is_constant(self.fakes[place[0]].shape[place[1]])
        }

    @property
    def is_changing(self) -> bool:
        """Whether any size is left that each call brings anew."""
        return any(not is_constant(self.fakes[position].shape[dimension]) for position, dimension in self._symbols)

    def _line_of(self, symbol: Any) -> str:
        found = line_of_decision(self.mode, symbol)
        return f"{found[0]}:{found[1]}" if found is not None and not is_ours(found[0]) else ""

    def note_line(self, number: Any) -> None:
        """Note where the program takes a plain number, which fixes a size."""
        for symbol in expression_of(number).free_symbols:
            self._lines.setdefault(symbol, here())

    def note_length(self, tensor: Tensor) -> None:
        """Note where the program takes the length of a tensor."""
        if not is_constant(number := tensor.shape[0]):
            self.note_line(number)

    def seen(self, value: Any) -> Any:
        """A number computed from sizes, or several, as the user's code is to see it."""
        kind = type(value)
        if kind is torch.SymInt or kind is torch.SymFloat:
            known = value.node.maybe_as_int() if kind is torch.SymInt else None
            return (TracedInt if kind is torch.SymInt else TracedFloat)(value.node, self) if known is None else known
        if kind is torch.SymBool:
            return bool(value)
        return kind(map(self.seen, value)) if kind is torch.Size or kind is tuple else value

    def scalar_of(self, number: Any, *, is_whole: bool) -> HostScalar:
        """The same as a number that the host knows after a replay, and the graph in a tensor."""
        expression = definition_of(number)
        if expression not in self._scalars:
            symbols: list[Any] = sorted(expression.free_symbols, key=str)
            places = [self._index_of[symbol] for symbol in symbols]
            evaluate = compile_expressions(symbols, [expression])
            dtype = torch.int64 if is_whole else torch.float64
            tensor = torch.full((), number, dtype=dtype, device=self._device)
            self._scalars[expression] = HostScalar(
                lambda values: evaluate(*(values[place] for place in places))[0],
                self._questions,
                self._device,
                frozenset(),
                is_whole=is_whole,
                origin="the size of an argument",
                build=lambda: tensor,
                bounds=((-MOST_ELEMENTS, MOST_ELEMENTS), USUAL),
            )
        return self._scalars[expression]


class _Traced:
    """The common part of ``TracedInt`` and ``TracedFloat``."""

    node: Any
    plain: type = float

    def __init__(self, node: Any, sizes: TracedSizes) -> None:
        super().__init__(node)  # type: ignore[call-arg]
        self.sizes = sizes

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` finds, beside the type: for PyTorch a symbolic number, for all others a plain one."""
        return type(self) if _is_asked_by_pytorch(sys._getframe(1)) else self.plain

    def scalar(self) -> HostScalar:
        """As a number that the host knows after a replay."""
        return self.sizes.scalar_of(self, is_whole=self.plain is int)

    def __hash__(self) -> int:
        return hash(self.scalar())  # which says why not

    def __repr__(self) -> str:
        return repr(self.scalar())

    def __str__(self) -> str:
        return str(self.scalar())

    def __format__(self, spec: str) -> str:
        return format(self.scalar(), spec)

    def __reduce__(self) -> Any:
        self.scalar().refuse("The step copies or pickles")


class TracedInt(_Traced, torch.SymInt):
    """A whole number computed from sizes."""

    plain = int
    __hash__ = _Traced.__hash__

    def __int__(self) -> int:
        return self.__index__()

    def __index__(self) -> int:
        self.sizes.note_line(self)
        return int(torch.SymInt.__index__(self))

    def __float__(self) -> float:
        return float(self.__index__())


class TracedFloat(_Traced, torch.SymFloat):
    """Another number computed from sizes."""

    __hash__ = _Traced.__hash__

    def __float__(self) -> float:
        self.sizes.note_line(self)
        return float(self.node.guard_float("", 0))

    def __int__(self) -> int:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        return int(self.__float__())


def is_traced_size(value: Any) -> bool:
    """Return whether the user's code has computed it from sizes; unlike ``isinstance``, asks it nothing."""
    return issubclass(type(value), _Traced)


def _arithmetic(base: type, name: str) -> Callable[..., Any]:
    """Make the method for an operator: what it gives is seen by the program in turn."""
    original = getattr(base, f"__{name}__")

    def method(self: Any, *others: Any) -> Any:
        if any(map(is_scalar, others)):
            return getattr(operator, name.removeprefix("r"))(*_ordered(name, self.scalar(), *others))
        return self.sizes.seen(original(self, *others))

    return method


def _ordered(name: str, own: Any, *others: Any) -> tuple[Any, ...]:
    return (*others, own) if name.startswith("r") else (own, *others)


def _comparison(base: type, name: str) -> Callable[..., Any]:
    original = getattr(base, f"__{name}__")

    def method(self: Any, other: Any) -> Any:
        answer = original(self, other.plain() if is_scalar(other) else other)
        return answer if answer is NotImplemented else bool(answer)

    return method


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _kind, _base in ((TracedInt, torch.SymInt), (TracedFloat, torch.SymFloat)):
    for _name in (*_TWO, *(f"r{name}" for name in _TWO), "neg", "abs"):
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _arithmetic(_base, _name))
    for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_kind, f"__{_name}__", _comparison(_base, _name))
