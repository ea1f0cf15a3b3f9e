"""Sizes that change between calls: symbols of a ``ShapeEnv`` and expressions of them. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.utils._pytree import tree_map_only
from torch.utils._sympy.printers import PythonPrinter

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(values: Iterable[Any]) -> bool:
    """Return whether there is a symbolic number, or a tensor that has one for a size or stride."""
    return any(isinstance(value, NUMBERS) or _has_symbolic_sizes(value) for value in values)


def _has_symbolic_sizes(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))


def expression_of(number: Any) -> sympy.Basic:
    """Return what a symbolic number is, in the symbols that are left of those once equal."""
    return number.node.expr  # type: ignore[no-any-return]


def definition_of(number: Any) -> sympy.Basic:
    """Return what a symbolic number is, in the symbols that it was made of."""
    return number.node._expr  # type: ignore[no-any-return]


def simplified(number: Any) -> Any:
    """A plain number where no symbol is left in it."""
    if isinstance(number, NUMBERS) and not (found := expression_of(number)).free_symbols:
        return bool(found) if isinstance(number, torch.SymBool) else number.node.pytype(found)
    return number


def with_numbers(tree: Any, number_of: Callable[[sympy.Basic], Any]) -> Any:
    """Replace bare expressions, as Inductor leaves them among the arguments of operators."""
    return tree_map_only(sympy.Basic, number_of, tree)


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a strided tensor may lie at one place. Nothing is decided about symbolic sizes."""
    all_steps = zip(tensor.shape, tensor.stride(), strict=True)
    steps = [(size, stride) for size, stride in all_steps if not statically_known_true(size == 1)]
    if not all(number.node.has_hint() for step in steps for number in step if isinstance(number, torch.SymInt)):
        return True
    last: Any = 0  # element of the dimensions so far
    for size, stride in sorted(steps, key=lambda step: _hint(step[1])):
        if not statically_known_true(stride > last):
            return True
        last += (size - 1) * stride
    return False


def _hint(number: Any) -> int:
    return number.node.hint if isinstance(number, torch.SymInt) else number  # type: ignore[no-any-return]


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


def mode_for_sizes() -> FakeTensorMode:
    """A mode for fake tensors with symbolic sizes; a size that depends on values raises as without symbols."""
    return FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))


def calculating_methods() -> dict[str, FunctionType]:
    """Return what symbolic numbers are calculated, compared and decided by."""
    return {name: method for name, method in vars(SymNode).items() if isinstance(method, FunctionType)}


def fake_with_symbols(
    mode: FakeTensorMode, tensor: torch.Tensor, dimensions: Container[int], position: int
) -> torch.Tensor:
    """A fake tensor like ``tensor``, in memory of its own, whose sizes in ``dimensions`` are symbols.

    Each is a symbol of its own, whatever others have the same size now; 0 and 1 stay numbers. Strides follow from
    sizes.
    """
    assert mode.shape_env is not None
    context = StatelessSymbolicContext(  # type: ignore[var-annotated]
        [DimDynamic.DYNAMIC if each in dimensions else DimDynamic.STATIC for each in range(tensor.dim())]
    )
    size, stride, _ = mode.shape_env.create_symbolic_sizes_strides_storage_offset(
        tensor.detach(), ConstantSource(f"argument{position}"), symbolic_context=context
    )
    with mode:
        return torch.empty_strided(
            size, stride, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )


def guard_of(mode: FakeTensorMode, numbers: Sequence[Any]) -> Callable[..., bool]:
    """A function of the values of ``numbers``: whether all that was decided about symbols so far holds for them."""
    assert mode.shape_env is not None
    code = mode.shape_env.produce_guards_expression([*numbers], ignore_static=False) or "True"
    names = ", ".join(f"t{position}" for position in range(len(numbers)))
    text = re.sub(r"L\['(t\d+)'\]", r"\1", code)
    holds = eval(f"lambda {names}: {text}", dict(SYMPY_INTERP))  # noqa: S307

    def guard(*values: int) -> bool:
        try:
            return bool(holds(*values))
        except ZeroDivisionError:  # a size is none that it was decided for: conditions come in any order
            return False

    return guard


def is_constant(number: Any) -> bool:
    """Return whether a size is no symbol any more, if it ever was."""
    return not isinstance(number, torch.SymInt) or number.node.maybe_as_int() is not None


def line_of_decision(mode: FakeTensorMode, symbol: sympy.Symbol) -> tuple[str, int] | None:
    """File and line of what first made a number of a symbol, as far as PyTorch has noted it."""
    assert mode.shape_env is not None
    for guard in mode.shape_env.guards:
        frame: Any = guard.sloc.framework_loc
        if isinstance(guard.expr, sympy.Eq) and symbol in guard.expr.free_symbols and hasattr(frame, "lineno"):
            return frame.filename, frame.lineno
    return None
