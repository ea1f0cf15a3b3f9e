"""``float(number)``, ``int(number)`` and ``schedule[number]`` give a number of a graph for one.

Python asks the number to convert itself, and takes nothing but a plain number for an answer, on which the graph would
then depend. So for the length of a trace that needs it the types themselves are asked: see ``conversions.cpp``. Where
nothing can be compiled, each value has a graph as before.

**Contract**
- Nobody but code that has such a number in its hands sees a difference, whatever the thread.
- ``Conversions.num_seen`` says whether there was any: if not, or if the trace fails, it is made again without.
"""

from __future__ import annotations

import functools
import operator
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from millstream.capture.trace.arithmetic import compute
from millstream.capture.trace.scalars import GraphScalar, is_number, is_scalar
from millstream.device.native import as_builtin, load

_SOURCE = Path(__file__).with_name("conversions.cpp")


class Conversions:
    """What the traced program converts.

    Attributes:
        num_seen: How often it has got a number of a graph for one.
    """

    def __init__(self) -> None:
        self.num_seen = 0

    @contextmanager
    def seen(self) -> Iterator[None]:
        """For the length of the context they give numbers of a graph. One thread may be within it."""
        library = _library()
        if library is None:
            yield
            return
        library["begin"](self._convert, GraphScalar, np.ndarray)
        try:
            yield
        finally:
            library["end"]()

    def _convert(self, owner: Any, number: GraphScalar) -> Any:
        if number.is_asked_by_others:
            plain = number.outside()
            return owner(plain) if isinstance(owner, type) else owner[plain]
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


def can_be_seen() -> bool:
    """Whether there is compiled code for it."""
    return _library() is not None


@functools.cache
def _library() -> dict[str, Callable[..., Any]] | None:
    library = load(_SOURCE, f"-I{sysconfig.get_paths()['include']}")
    if library is None:
        return None
    return {name: as_builtin(library, f"millstream_conversions_{name}") for name in ("begin", "end")}
