"""Compiled checks of what a step's graph takes for granted: see ``_native/quick_guards.cpp``.

Without compiled code, Python checks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import Tensor

from millstream import _native
from millstream._torch.tensors import place_of_implementation
from millstream.capture.record.location import MISSING

DEVICES = frozenset({"cuda"})
"""Where tensors must be for their step to be checked in this way from its first call on, as the device would wait.

Others are once they have run some times, and do not wait until the checks are compiled.
"""

NOTHING, ALL, BORROWED = 0, 1, 2
"""What ``QuickGuards.hold`` says that holds: the last is what was taken from PyTorch and Python, and maybe no more."""


def begin_early(given: Iterable[Any]) -> None:
    """Let the checks be compiled meanwhile, in a thread, if a step that is given this takes them from its first call.

    They are needed once the step is traced, and to compile them takes longer than a small trace.
    """
    if any(isinstance(value, Tensor) and value.device.type in DEVICES for value in given):
        with suppress(RuntimeError):  # the system refuses the thread
            _native.is_ready("tensors")


class QuickGuards:
    """Conditions on entries, containers and tensors, in compiled code.

    Args:
        entries: Dict, list, closure cell or mapping; key; and the value it must hold, or ``MISSING``.
        containers: Dicts and lists that must keep their length.
        orders: Dicts, and the keys that they must have, in that order.
        pins: An object; 0 for its class, 1 for a class's bases; and what that must be.
        functions: A function; its code, its defaults, and those by keyword.
        tensors: Must keep their memory, their layout, and whether they require a gradient.
        gradients: What each of them must have.
        written: Tensors whose versions ``bump_versions`` counts up.
        borrowed: Like ``entries``, of PyTorch's and Python's modules and classes, which hardly ever change.

    Raises:
        ValueError: Something cannot be watched in this way, or there is no compiled code.
    """

    def __init__(  # noqa: PLR0913  one a kind of what is compared
        self,
        entries: Sequence[tuple[Any, Any, Any]],
        containers: Sequence[Any],
        orders: Sequence[tuple[dict[Any, Any], tuple[Any, ...]]],
        pins: Sequence[tuple[Any, int, Any]],
        functions: Sequence[tuple[FunctionType, Any, Any, Any]],
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        written: Sequence[Tensor],
        borrowed: Sequence[tuple[dict[str, Any], str, Any]] = (),
    ) -> None:
        # The compiled code borrows; holding on to things is left to Python, whose collector can see through it.
        self._kept = tuple(
            map(list, (entries, containers, orders, pins, functions, tensors, gradients, written, borrowed))
        )
        compiled, place = _native.load("tensors"), place_of_implementation()
        if compiled is None or place is None:
            raise ValueError("There is no compiled code.")
        self.hold, self.bump_versions = compiled.make_guards(place, MISSING, *self._kept)
