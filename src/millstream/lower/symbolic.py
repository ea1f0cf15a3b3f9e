"""A program that was compiled once for many sizes, and the concrete program at each of them.

Inductor's kernels take sizes as arguments. So all that differs between two sizes are numbers: of elements and strides,
of bytes, and among the arguments of calls. They are kept as expressions, which are evaluated for the sizes of a call.
Schedules, checks and engines see concrete programs only; but as kernels, reads and writes are the same at every size,
a plan that only orders them is right for all, and its text can leave the numbers open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import sympy

from millstream._torch.compiler.symbols import NUMBERS, compile_expressions, expression_of
from millstream.errors import LoweringError
from millstream.program import Program

#: Fields of a program in which there are no sizes.
_WITHOUT_SIZES = frozenset({"inputs", "constants", "mutated", "aligned", "numbers"})


@dataclass(frozen=True, slots=True)
class _Number:
    """Stands for an expression, by its place among all of them."""

    position: int


class SymbolicProgram:
    """A program whose sizes are expressions of a few whole numbers that come with every call.

    Args:
        program: With symbolic numbers for sizes; ``numbers`` says which inputs are symbols themselves.

    Raises:
        LoweringError: A size follows from no input: it is known only when kernels have run.
    """

    def __init__(self, program: Program) -> None:
        self.program = program  # with symbolic numbers
        self._expressions: dict[sympy.Basic, _Number] = {}
        self._recipes = {
            field.name: self._recipe(getattr(program, field.name))
            for field in fields(program)
            if field.name not in _WITHOUT_SIZES
        }
        free: set[Any] = {symbol for expression in self._expressions for symbol in expression.free_symbols}
        symbols = sorted(free, key=str)
        sources = _sources(program)
        for symbol in symbols:
            if symbol not in sources:
                raise LoweringError(
                    f"Size {symbol} is known only when a kernel has run: it follows from no input.",
                    construct=str(symbol),
                )
        #: Their names, in the order of their values.
        self.symbols = tuple(map(str, symbols))
        #: From the list of inputs of a call to the values of the symbols.
        self.sizes: Callable[[Sequence[Any]], tuple[int, ...]] = eval(  # noqa: S307  our own text
            f"lambda inputs: ({''.join(f'{sources[symbol]}, ' for symbol in symbols)})"
        )
        self._evaluate = compile_expressions(symbols, list(self._expressions))
        devices = {buffer.device.partition(":")[0] for buffer in program.graph.buffers}
        self.device_type = max(devices, key=lambda name: name != "cpu", default="cpu")
        #: Names of all numbers in ``open_at``.
        self.names = tuple(f"size_{position}" for position in range(len(self._expressions)))

    def at(self, sizes: tuple[int, ...]) -> Program:
        """The program for the inputs that have these sizes."""
        return self._with(self._evaluate(*sizes))

    def open_at(self, sizes: tuple[int, ...]) -> Program:
        """As ``at``, with numbers that are written as ``names``: for text that is to serve all sizes."""
        return self._with(tuple(map(named, self.names, self._evaluate(*sizes))))

    def values(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what ``names`` stand for in a call with these inputs."""
        return self._evaluate(*self.sizes(inputs))  # type: ignore[no-any-return]

    def _with(self, values: tuple[Any, ...]) -> Program:
        concrete = {name: _fill_in(recipe, values) for name, recipe in self._recipes.items()}
        return replace(self.program, numbers={}, **concrete)

    def _recipe(self, tree: Any) -> Any:
        """The same with a place in ``values`` for every expression; what has none stays the object that it is."""
        if isinstance(tree, NUMBERS):
            expression = expression_of(tree)
            return self._expressions.setdefault(expression, _Number(len(self._expressions)))
        if isinstance(tree, dict):
            made: Any = {key: self._recipe(item) for key, item in tree.items()}
            return _Parts(made) if any(made[key] is not item for key, item in tree.items()) else tree
        if isinstance(tree, (list, tuple)):
            made = [self._recipe(item) for item in tree]
            if all(new is old for new, old in zip(made, tree, strict=True)):
                return tree
            return _Parts(made if isinstance(tree, list) else tuple(made))
        if is_dataclass(tree) and not isinstance(tree, type):
            own = {field.name: getattr(tree, field.name) for field in fields(tree)}
            changed = {name: new for name, old in own.items() if (new := self._recipe(old)) is not old}
            return _Object(tree, changed) if changed else tree
        return tree


class Named:
    """A number that is written as a name."""

    name: str

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.name


class _NamedInt(Named, int):
    pass


class _NamedFloat(Named, float):
    pass


def named(name: str, value: Any) -> Any:
    """A number that is written as a name and has, elsewhere, this value."""
    number = _NamedFloat(value) if isinstance(value, float) else _NamedInt(value)
    number.name = name
    return number


@dataclass(frozen=True, slots=True)
class _Parts:
    """A collection that has expressions somewhere within."""

    items: Any


@dataclass(frozen=True, slots=True)
class _Object:
    """A dataclass that has expressions somewhere within these of its fields."""

    original: Any
    changed: dict[str, Any]


def _fill_in(tree: Any, values: tuple[Any, ...]) -> Any:
    kind = type(tree)
    if kind is _Number:
        return values[tree.position]
    if kind is _Parts:
        items = tree.items
        if type(items) is dict:
            return {key: _fill_in(item, values) for key, item in items.items()}
        made = [_fill_in(item, values) for item in items]
        return made if type(items) is list else tuple(made)
    if kind is _Object:
        return replace(tree.original, **{name: _fill_in(item, values) for name, item in tree.changed.items()})
    return tree


def _sources(program: Program) -> dict[sympy.Basic, str]:
    """For each symbol, Python text that takes it from the list of inputs; some have become plain numbers meanwhile."""
    found = [(number, f"inputs[{position}]") for position, number in program.numbers.items()]
    for position, name in enumerate(program.inputs):
        layout = program.tensors.get(name) if name is not None else None
        if layout is None:
            continue
        for what, numbers in (("size", layout.size), ("stride", layout.stride)):
            found += [(number, f"inputs[{position}].{what}({each})") for each, number in enumerate(numbers)]
    sources: dict[sympy.Basic, str] = {}
    for number, text in found:
        if isinstance(number, NUMBERS):
            sources.setdefault(expression_of(number), text)
    return sources
