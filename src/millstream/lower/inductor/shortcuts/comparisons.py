"""Numbers are compared as numbers, and not as expressions of SymPy.

Private APIs of Inductor's sizes; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from sympy.core.parameters import global_parameters
from torch._inductor.sizevars import SizeVarAllocator

from millstream._torch.workarounds import replaced

_COMPARE: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Le: operator.le,
    sympy.Lt: operator.lt,
    sympy.Ge: operator.ge,
    sympy.Gt: operator.gt,
}


@contextlib.contextmanager
def quick_comparisons() -> Iterator[None]:
    """Let relations of two whole numbers be true or false at once, and the same number be what one is simplified to."""
    simplify = SizeVarAllocator.simplify

    def simplify_at_once(self: Any, expr: Any) -> Any:
        return expr if isinstance(expr, sympy.Integer) else simplify(self, expr)

    with contextlib.ExitStack() as stack:
        # Other threads get the same results.
        for owner in dict.fromkeys(_defining_class(relation) for relation in _COMPARE):
            stack.enter_context(replaced(owner, "__new__", staticmethod(_compare_at_once(owner.__new__))))
        stack.enter_context(replaced(SizeVarAllocator, "simplify", simplify_at_once))
        yield


def _defining_class(relation: Any) -> Any:
    return next(owner for owner in relation.__mro__ if "__new__" in vars(owner))


def _compare_at_once(make: Callable[..., Any]) -> Callable[..., Any]:
    def compare(cls: Any, lhs: Any, rhs: Any, **options: Any) -> Any:
        holds = _COMPARE.get(cls)
        if holds and _is_number(lhs) and _is_number(rhs) and not options and global_parameters.evaluate:
            return sympy.true if holds(int(lhs), int(rhs)) else sympy.false
        return make(cls, lhs, rhs, **options)

    return compare


def _is_number(value: Any) -> bool:
    return type(value) is int or isinstance(value, sympy.Integer)
