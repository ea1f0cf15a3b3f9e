"""``float(number)``, ``int(number)``, ``schedule[number]`` and ``"%.3f" % number`` take a number of a graph for one.

Python asks the number to convert itself, and takes nothing but a plain number for an answer, on which the graph would
then depend. So for the length of a trace that needs it the types themselves are asked: see
``_native/conversions.cpp``. Without compiled code, each value has a graph as before.

**Contract**
- Nobody but code that has such a number in its hands sees a difference, whatever the thread.
- ``Conversions.num_seen`` says whether there was any: if not, or if the trace fails, it is made again without.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from millstream import _native
from millstream.capture.lines import may_be_caught
from millstream.capture.trace.numbers.arithmetic import compute
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.numpy_arrays import LaterArray
from millstream.capture.trace.numbers.scalars import GraphScalar, is_number, is_scalar

_FIELD = re.compile(r"%(?:\((?P<key>[^)]*)\))?(?P<how>[-+ #0]*[\d*]*(?:\.[\d*]*)?)[hlL]?(?P<kind>.)", re.DOTALL)
"""A place in text for a value, as Python's documentation of printf-style formatting has it."""


class Conversions:
    """Numbers that the traced program converts.

    Attributes:
        num_seen: How often it has got a number of a graph for one.
    """

    def __init__(self) -> None:
        self.num_seen = 0

    @contextmanager
    def seen(self, tensors: type[Tensor]) -> Iterator[None]:
        """For the length of the context they take numbers of a graph. One thread may be within it.

        Args:
            tensors: The class of tensors that the step makes.
        """
        core = _native.load("core")
        if core is None:
            yield
            return
        core.begin_conversions(
            self._convert, (GraphScalar, HostScalar, LaterArray, tensors, Tensor, nn.Parameter, nn.Buffer), np.ndarray
        )
        try:
            yield
        finally:
            core.end_conversions()

    def _convert(self, owner: Any, value: Any) -> Any:
        if isinstance(owner, str):
            return self._put_in(owner, value)
        number = value if is_scalar(value) else value.item()
        if not is_scalar(number):
            return owner(number)
        if number.is_asked_by_others:
            plain = number.outside()
            return owner(plain) if isinstance(owner, type) else owner[plain]
        if isinstance(number, HostScalar):
            self.num_seen += 1
            if owner is float:
                return compute(operator.mul, number, 1.0) if number.is_whole else number
            return compute(operator.add, number, 0) if number.is_whole else compute(int, number)  # also of a bool
        if isinstance(owner, type):
            self.num_seen += 1
            return compute(owner, number)
        if not (number.has_integer and -len(owner) <= number.value < len(owner)):
            return owner[number.plain()]  # which raises
        item = owner[int(number.value)]
        if is_scalar(item) or not is_number(item):
            return owner[number.plain()]
        self.num_seen += 1
        return compute(operator.getitem, owner, number)

    def _put_in(self, text: str, values: Any) -> str:
        """Return what ``text % values`` is, with text in it that is known later."""
        waiting = [*reversed(values if type(values) is tuple else (values,))]

        def made(field: re.Match[str]) -> str:
            key, how, kind = field["key"], field["how"], field["kind"]
            if kind == "%":
                return "%"
            if key is None and not waiting:
                raise TypeError("not enough arguments for format string")
            if "*" in how:
                return (f"%{how}{kind}") % (*(waiting.pop() for _ in range(how.count("*"))), waiting.pop())
            value = waiting.pop() if key is None else values[key]
            if isinstance(value, Tensor) and kind not in "sra":
                value = value.item()
            form = f"%{how}{kind}"
            if issubclass(type(value), LaterArray) and kind not in "sra":
                value = value.item()
            if issubclass(type(value), LaterArray):
                self.num_seen += 1
                return value.text_by(lambda array: form % (array,))
            if is_scalar(value):
                if isinstance(value, HostScalar) and kind in "diouxXc" and not value.is_whole and may_be_caught():
                    value.refuse("The step makes text that may fail, where that is caught, of")
                self.num_seen += 1
                return value.text_by(lambda number: form % (number,))
            if kind == "s" and not how:
                return str(value)
            return form % (value,)

        result = _FIELD.sub(made, text)
        if waiting and not isinstance(values, dict):
            raise TypeError("not all arguments converted during string formatting")
        return result


def can_be_seen() -> bool:
    """Return whether there is compiled code for it."""
    return _native.load("core") is not None
