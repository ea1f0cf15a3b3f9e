"""Sizes that each call brings anew: symbols of a ``ShapeEnv`` and expressions of them. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_map_only
from torch.utils._sympy.printers import PythonPrinter

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(values: Iterable[Any]) -> bool:
    """Whether there is a symbolic number, or a tensor that has one for a size or stride."""
    return any(isinstance(value, NUMBERS) or _has_symbolic_sizes(value) for value in values)


def _has_symbolic_sizes(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))


def expression_of(number: Any) -> sympy.Basic:
    """What a symbolic number is, in the symbols that are left of those once equal."""
    return number.node.expr  # type: ignore[no-any-return]


def simplified(number: Any) -> Any:
    """A plain number where no symbol is left in it."""
    if isinstance(number, NUMBERS) and not (found := expression_of(number)).free_symbols:
        return bool(found) if isinstance(number, torch.SymBool) else number.node.pytype(found)
    return number


def with_numbers(tree: Any, number_of: Callable[[sympy.Basic], Any]) -> Any:
    """Replace bare expressions, as Inductor leaves them among the arguments of operators."""
    return tree_map_only(sympy.Basic, number_of, tree)


def compile_expressions(symbols: Sequence[sympy.Symbol], expressions: Sequence[sympy.Basic]) -> Callable[..., Any]:
    """A function from the values of symbols, in order, to those of expressions, as a tuple."""
    printer = PythonPrinter()
    names = ", ".join(symbol.name for symbol in symbols)
    results = "".join(f"{printer.doprint(expression)}, " for expression in expressions)
    return eval(f"lambda {names}: ({results})", {"math": math, "torch": torch})  # type: ignore[no-any-return] # noqa: S307


@contextlib.contextmanager
def without_guards(values: Iterable[Any]) -> Iterator[None]:
    """Let decisions about symbols hold for nobody: for estimates, which need only be right for the present call."""
    environments = {
        id(mode.shape_env): mode.shape_env
        for value in values
        if (mode := getattr(value, "fake_mode", None)) is not None and mode.shape_env is not None
    }
    with contextlib.ExitStack() as stack:
        for environment in environments.values():
            stack.enter_context(environment.suppress_guards())
        yield
