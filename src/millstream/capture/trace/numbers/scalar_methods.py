"""The methods of scalars that Python calls: operators, comparisons, conversions. Importing this gives them these."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.capture.trace.numbers.arithmetic import NumberForm, bounds_of, compute, of_answers
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.scalars import GraphScalar, as_scalar, is_scalar, is_tensor


def _combining(function: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[GraphScalar, Any], Any]:
    """Make the method for an arithmetic operator."""

    def method(self: GraphScalar, other: Any) -> Any:
        if is_tensor(other) and not self.is_asked_by_others:
            own = self.as_tensor_for(other)
            return function(other, own) if swapped else function(own, other)
        other = as_scalar(other)
        if not _is_operand(other):
            return NotImplemented
        return compute(function, other, self) if swapped else compute(function, self, other)

    return method


def _comparing(function: Callable[[Any, Any], Any]) -> Callable[[GraphScalar, Any], Any]:
    """Make the method for a comparison."""

    def method(self: GraphScalar, other: Any) -> Any:
        if self.is_asked_by_others:
            return function(self.outside(), other)
        if is_tensor(other):
            return function(self.as_tensor_for(other), other)
        other = as_scalar(other)
        if not _is_operand(other):
            return NotImplemented
        outcome = compute(function, self, other, form=of_answers(function))
        return outcome if is_scalar(outcome) else bool(outcome)

    return method


def _is_operand(value: Any) -> bool:
    return is_scalar(value) or isinstance(value, int | float | np.number)


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method for a function of the number alone."""
    return lambda self: compute(function, self)


def _divmod(self: GraphScalar, other: Any) -> Any:
    return self // other, self % other


def _rdivmod(self: GraphScalar, other: Any) -> Any:
    return other // self, other % self


def _round(self: GraphScalar, digits: int | None = None) -> Any:
    operands = (self,) if digits is None else (self, digits)
    if not self.is_whole:
        form = NumberForm(digits is None, lambda number, *_: _rounded(number, digits))
    elif digits is None or digits >= 0:
        form = NumberForm(True, lambda number, *_: number, bounds_of(self))
    else:
        form = NumberForm(True, lambda number, *_: _rounded_to(number, 10**-digits))
    return compute(round, *operands, form=form)


def _rounded(number: Tensor, digits: int | None) -> Tensor:
    return torch.round(number).to(torch.int64) if digits is None else torch.round(number, decimals=digits)


def _rounded_to(number: Tensor, unit: int) -> Tensor:
    """The nearest multiple; of two that are as near the even one."""
    below = number // unit
    rest = 2 * (number - below * unit)
    return (below + ((rest > unit) | ((rest == unit) & (below % 2 == 1)))) * unit


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "xor"):
    _function = getattr(operator, _name)
    setattr(GraphScalar, f"__{_name.rstrip('_')}__", _combining(_function, swapped=False))
    setattr(GraphScalar, f"__r{_name.rstrip('_')}__", _combining(_function, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(GraphScalar, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name, _function in {
    "neg": operator.neg,
    "abs": abs,
    "invert": operator.invert,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}.items():
    setattr(GraphScalar, f"__{_name}__", _of_one(_function))


def _pow(self: GraphScalar, other: Any, modulus: Any = None) -> Any:
    if modulus is None:
        return _POWER(self, other)
    return compute(pow, self, other, modulus) if _is_operand(other) and _is_operand(modulus) else NotImplemented


_POWER = _combining(operator.pow, swapped=False)
for _name, _method in {"divmod": _divmod, "rdivmod": _rdivmod, "round": _round, "pow": _pow}.items():
    setattr(GraphScalar, f"__{_name}__", _method)


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method for what needs the plain number."""
    return lambda self: function(self.plain())


setattr(GraphScalar, "__complex__", _of_plain(complex))  # noqa: B010
for _name in ("is_integer", "as_integer_ratio", "conjugate", "hex"):  # which the parent class has
    setattr(GraphScalar, _name, _of_plain(lambda number, name=_name: getattr(number, name)()))


def _refusing(name: str, what: str) -> Callable[[HostScalar], Any]:
    """Make the method for what needs a value."""
    function = getattr(operator, name) if name == "index" else getattr(builtins, name)

    def refuse(self: HostScalar) -> Any:
        if self.is_asked_by_others:
            return function(self.outside())
        self.questions.num_converted += name in ("float", "int")
        return self.refuse(what)

    return refuse


for _name, _what in {
    "float": "The step makes a float of",
    "int": "The step makes an int of",
    "index": "The step indexes with",
    "hash": "The step looks something up by",
}.items():
    setattr(HostScalar, f"__{_name}__", _refusing(_name, _what))


def _branch(self: HostScalar) -> bool:
    """The outcome with which the program goes on, where what another leads to can run after the graph."""
    if self.is_asked_by_others:
        return bool(self.outside())
    outcome = self.questions.branch(self)
    return self.refuse("The step branches on") if outcome is None else outcome


setattr(HostScalar, "__bool__", _branch)  # noqa: B010
