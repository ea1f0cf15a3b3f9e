"""Expressions of sizes as plain data, and what was decided about their symbols. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from millstream._torch.compiler.symbols import NUMBERS, definition_of, expression_of

_KINDS = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}


def symbols_of(values: Iterable[Any]) -> dict[str, Any]:
    """The symbolic numbers among values, and among their sizes and strides, that are symbols themselves, by name."""
    found: dict[str, Any] = {}
    for value in values:
        numbers = [value]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            numbers = [*value.shape, *value.stride()]
        for number in numbers:
            if isinstance(number, NUMBERS) and definition_of(number).is_Symbol and number.node.has_hint():
                found.setdefault(str(definition_of(number)), number)
    return dict(sorted(found.items()))


def encode_expression(expression: sympy.Basic) -> Any:
    """Write an expression as nested lists.

    Raises:
        ValueError: It has parts that cannot be found again by name.
    """
    data = _encode(expression)
    if decode_expression(data, {symbol.name: symbol for symbol in expression.free_symbols}) != expression:  # type: ignore[attr-defined]
        raise ValueError(f"{expression} is another one when it is read")
    return data


def _encode(expression: sympy.Basic) -> Any:
    if isinstance(expression, sympy.Symbol):
        return ["symbol", expression.name]
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return ["Rational", int(expression.p), int(expression.q)]
    if isinstance(expression, sympy.Float):
        return ["float", float(expression).hex()]
    if not expression.args or _class_of(type(expression).__name__) is not type(expression):
        raise ValueError(f"{expression} has a {type(expression).__name__} in it")
    return [type(expression).__name__, *map(_encode, expression.args)]


def decode_expression(data: Any, symbols: Mapping[str, sympy.Basic]) -> sympy.Basic:
    """Read what ``encode_expression`` has written.

    Raises:
        LookupError: It names what there is not.
    """
    if isinstance(data, int):
        return sympy.Integer(data)
    name, *parts = data
    if name == "symbol":
        return symbols[parts[0]]
    if name == "float":
        return sympy.Float(float.fromhex(parts[0]))
    return _class_of(name)(*[decode_expression(part, symbols) for part in parts])  # type: ignore[no-any-return]


def _class_of(name: str) -> Any:
    """A class of expressions: PyTorch's own, or sympy's."""
    for module in (functions, sympy):
        found = vars(module).get(name)
        if isinstance(found, type) and issubclass(found, sympy.Basic):
            return found
    raise LookupError(f"there are no expressions called {name}")


def kind_of_number(number: Any) -> str:
    """``int``, ``float`` or ``bool``."""
    return next(kind for base, kind in _KINDS.items() if isinstance(number, base))


def number_of(kind: str, expression: sympy.Basic, symbols: Mapping[str, Any]) -> Any:
    """A symbolic number of a kind, in the environment of the symbols; a plain one where no symbol is left in it."""
    if not expression.free_symbols:
        return {"int": int, "float": float, "bool": bool}[kind](expression)  # type: ignore[arg-type]
    environment = next(iter(symbols.values())).node.shape_env
    if kind == "bool":
        return environment.create_symboolnode(expression)
    make = environment.create_symintnode if kind == "int" else environment.create_symfloatnode
    return make(expression, hint=None)


def guards_of(symbols: Mapping[str, Any]) -> str:
    """All that was decided about symbols, as text for ``hold_guards``; empty where nothing was.

    Raises:
        ValueError: Something was decided about them and others together.
    """
    numbers = list(symbols.values())
    own = {part for number in numbers for part in (definition_of(number), *expression_of(number).free_symbols)}
    guards = []
    for guard in numbers[0].node.shape_env.guards:
        if guard.expr.free_symbols <= own:
            guards.append(guard)
        elif guard.expr.free_symbols & own:
            raise ValueError(f"{guard.expr} was decided, which is not about these inputs alone")
    return numbers[0].node.shape_env.produce_guards_expression(numbers, guards=guards, ignore_static=False) or ""


def hold_guards(text: str, numbers: Sequence[Any]) -> bool:
    """Return whether guards hold for the present call; if so, they are guards of the present graph from now on.

    Args:
        text: Made by ``guards_of``.
        numbers: Symbolic numbers for the symbols of that time, in the same order.
    """
    if not text:
        return True
    evaluate = numbers[0].node.shape_env.evaluate_guards_expression
    return bool(evaluate(text, [number.node.hint for number in numbers])) and bool(evaluate(text, numbers))
