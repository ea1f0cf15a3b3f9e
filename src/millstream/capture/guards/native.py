"""Compiled checks of what a step's graph takes for granted: see ``quick_guards.cpp``.

Where there is no compiler, Python checks alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor

from millstream._torch.tensors import place_of_implementation
from millstream.capture.record.location import MISSING
from millstream.device import tensor_specs
from millstream.device.native import load, torch_options

DEVICES = frozenset({"cuda"})
"""Where tensors must be for their step to be checked in this way from its first call on, as the device would wait.

Others are once they have run some times, and do not wait until the checks are compiled.
"""

NOTHING, ALL, BORROWED = 0, 1, 2
"""What ``QuickGuards.hold`` says that holds: the last is what was taken from PyTorch and Python, and maybe no more."""

_SOURCE = Path(__file__).with_name("quick_guards.cpp")


class QuickGuards:
    """Conditions on entries, containers and tensors, in compiled code.

    Args:
        library: From ``load_library``.
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
        ValueError: Something cannot be watched in this way.
    """

    def __init__(  # noqa: PLR0913  one a kind of what is compared
        self,
        library: ctypes.PyDLL,
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
        self._handle: ctypes.c_void_p | None = None  # until there is one: an interrupt may come first
        # The compiled code borrows; holding on to things is left to Python, whose collector can see through it.
        self._kept = tuple(
            map(list, (entries, containers, orders, pins, functions, tensors, gradients, written, borrowed))
        )
        self._drop = library.millstream_drop
        self._handle = handle = ctypes.c_void_p(library.millstream_make(place_of_implementation()))
        self.hold = functools.partial(library.millstream_hold, handle)
        self.bump_versions = functools.partial(library.millstream_bump_versions, handle)
        accepted = [
            add(handle, id(holder), id(key), None if value is MISSING else id(value))
            for add, places in ((library.millstream_add_entry, entries), (library.millstream_add_borrowed, borrowed))
            for holder, key, value in places
        ]
        accepted += (library.millstream_add_length(handle, id(container)) for container in containers)
        accepted += (library.millstream_add_order(handle, id(mapping), id(keys)) for mapping, keys in orders)
        accepted += (library.millstream_add_pin(handle, id(owner), part, id(value)) for owner, part, value in pins)
        accepted += (library.millstream_add_function(handle, *map(id, parts)) for parts in functions)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            wanted = None if gradient is None else gradient._cdata
            accepted.append(library.millstream_add_tensor(handle, id(tensor), wanted))
        accepted += (library.millstream_add_written(handle, id(tensor)) for tensor in written)
        if not all(accepted):
            raise ValueError("These conditions are beyond the compiled code.")

    def __del__(self) -> None:
        if self._handle is not None:
            self._drop(self._handle)


@functools.cache
def load_library() -> ctypes.PyDLL | None:
    """The compiled code, or ``None`` where it cannot be had."""
    library, pointer = load(_SOURCE, *torch_options()), ctypes.c_void_p
    if library is None or place_of_implementation() is None:
        return None
    signatures: dict[str, tuple[Any, Iterable[Any]]] = {
        "make": (pointer, (ctypes.c_size_t,)),
        "drop": (None, (pointer,)),
        "add_entry": (ctypes.c_int, (pointer,) * 4),
        "add_borrowed": (ctypes.c_int, (pointer,) * 4),
        "add_length": (ctypes.c_int, (pointer,) * 2),
        "add_order": (ctypes.c_int, (pointer,) * 3),
        "add_pin": (ctypes.c_int, (pointer, pointer, ctypes.c_int, pointer)),
        "add_function": (ctypes.c_int, (pointer,) * 5),
        "add_tensor": (ctypes.c_int, (pointer,) * 3),
        "add_written": (ctypes.c_int, (pointer,) * 2),
        "hold": (ctypes.c_int, (pointer,)),
        "bump_versions": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"millstream_{name}")
        function.restype, function.argtypes = result, list(arguments)
    return library


def is_made() -> bool:
    """Whether ``load_library`` need not wait; if not, a thread makes it, and what compares arguments, in seconds."""
    return not _maker().is_alive()


@functools.cache
def _maker() -> threading.Thread:
    thread = threading.Thread(target=_make, name="millstream-guards", daemon=True)
    thread.start()
    return thread


def _make() -> None:
    load_library()
    tensor_specs.compiled()
