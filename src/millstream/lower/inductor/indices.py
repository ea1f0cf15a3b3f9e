"""Indices of Inductor's loops, as places in memory. Symbolic sizes count as what they were in the example.

Private APIs of Inductor's loops; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, Identity, Max, Min, Mod, ModularIndexing, PythonMod
from torch.utils._sympy.symbol import SymT, symbol_is_type

from millstream.check.loop_accesses import FAR, Extent, Places, affine, anywhere

_SIZES = (SymT.SIZE, SymT.UNBACKED_INT, SymT.PRECOMPUTED_SIZE)
_UNKNOWN_SIZE = 8
"""For sizes that only the program finds out, such as the number of hits in a mask."""


def places_of(body: Any, index: Any) -> Places:
    """Return where a loop is by an index."""
    key = index, (*body.iter_vars, *body.reduce_vars), *map(tuple, body.sizes)
    return Places(key, functools.partial(_find, body, index))


def places_of_layout(layout: Any) -> Places:
    """All places of a tensor that lies in memory so."""
    sizes, strides, offset = (tuple(map(hint, part)) for part in (layout.size, layout.stride, [layout.offset]))
    key = sizes, strides, offset
    return Places(key, lambda: affine(zip(sizes, strides, strict=True), offset=offset[0]))


def _find(body: Any, index: Any) -> Extent:
    sizes = (hint(size) for part in body.sizes for size in part)
    loops = [*zip((*body.iter_vars, *body.reduce_vars), sizes, strict=True)]
    split = len(body.iter_vars)
    variables = [variable for variable, _ in loops]
    index = with_hints(sympy.sympify(index))
    if (found := _strides(index, variables)) is not None:
        offset, strides = found
        sized = [(size, stride) for (_, size), stride in zip(loops, strides, strict=True)]
        return affine(sized[:split], sized[split:], offset)
    if not index.free_symbols <= {*variables}:
        return anywhere()
    iterations, summed = (math.prod(size for _, size in part) for part in (loops[:split], loops[split:]))
    return Extent(iterations, summed, -FAR, FAR, compute=functools.partial(_evaluate_all, index, loops))


def hint(size: Any) -> int:
    """Return what a size was in the example."""
    return size if isinstance(size, int) else int(V.graph.sizevars.optimization_hint(size, fallback=_UNKNOWN_SIZE))


def with_hints(index: Any) -> Any:
    """An index with numbers for all sizes in it. What is loaded from memory stays unknown."""
    known = {each: sympy.Integer(hint(each)) for each in index.free_symbols if symbol_is_type(each, _SIZES)}
    return index.xreplace(known) if known else index


def _strides(index: Any, variables: Sequence[sympy.Symbol]) -> tuple[int, list[int]] | None:
    """The first element and how far each variable moves on, if the distances are equal."""
    offset, strides = 0, dict.fromkeys(variables, 0)
    terms: Any = sympy.Add.make_args(index)
    for term in terms:
        factor, rest = term.as_coeff_Mul()
        if rest.is_Integer and factor.is_Integer:
            offset += int(factor * rest)
        elif rest in strides and factor.is_Integer:
            strides[rest] += int(factor)
        else:
            return None
    return offset, [*strides.values()]


def _evaluate_all(index: Any, loops: Sequence[tuple[sympy.Symbol, int]]) -> np.ndarray | None:
    """An index at all values of its variables, those of the last one next to each other."""
    shape = tuple(size for _, size in loops)
    grids = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij", sparse=True)
    values = {variable: grid for (variable, _), grid in zip(loops, grids, strict=True)}
    found = _evaluate(index, values)
    return None if found is None else np.broadcast_to(found, shape)


_FUNCTIONS: dict[Any, Any] = {
    sympy.Add: lambda *terms: functools.reduce(operator.add, terms),
    sympy.Mul: lambda *factors: functools.reduce(operator.mul, factors),
    sympy.Mod: operator.mod,
    Mod: operator.mod,
    PythonMod: operator.mod,
    FloorDiv: operator.floordiv,
    ModularIndexing: lambda value, divisor, modulus: value // divisor % modulus,
    Identity: lambda value: value,
    **dict.fromkeys((sympy.Min, Min), lambda *values: functools.reduce(np.minimum, values)),
    **dict.fromkeys((sympy.Max, Max), lambda *values: functools.reduce(np.maximum, values)),
}


def _evaluate(index: Any, values: Mapping[sympy.Symbol, np.ndarray]) -> Any:
    """An index at some values of its variables; ``None`` where it has functions that are not known here."""
    if index.is_Integer:
        return int(index)
    if index.is_Symbol:
        return values.get(index)
    function = next((_FUNCTIONS[kind] for kind in type(index).__mro__ if kind in _FUNCTIONS), None)
    arguments = [_evaluate(each, values) for each in index.args]
    return None if function is None or any(each is None for each in arguments) else function(*arguments)
