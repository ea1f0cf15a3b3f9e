"""Whether tensors look like those before, asked in compiled code: see ``tensor_specs.cpp``.

Where there is no compiler, Python looks at each.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from millstream.device.native import as_builtin, load, torch_options

_SOURCE = Path(__file__).with_name("tensor_specs.cpp")


class TensorSpecs:
    """What some tensors look like, so that others can be compared with them.

    Args:
        leaves: Strided tensors of PyTorch's own class.
        place: Of the pointer to the implementation in a Python tensor, in bytes; ``None`` if it is not known.

    Raises:
        ValueError: Nothing can be compared with these, or there is no compiled code.
    """

    def __init__(self, leaves: Sequence[Tensor], place: int | None) -> None:
        library = compiled()
        if library is None or place is None:
            raise ValueError("There is no compiled code.")
        self._drop = library.millstream_drop
        self._handle = handle = ctypes.c_void_p(library.millstream_make(id(Tensor), place))
        self._blank = array("Q", bytes(8 * len(leaves)))
        self._compare = functools.partial(_compare(library), handle.value)
        if not all(library.millstream_add(handle, id(leaf)) for leaf in leaves):
            raise ValueError("These leaves are beyond the compiled code.")

    def find(self, leaves: list[Any]) -> array[int] | None:
        """The addresses of leaves that look the same, no two with a storage in common; ``None`` where they do not."""
        addresses = self._blank[:]
        return addresses if self._compare(leaves, addresses.buffer_info()[0]) else None

    def __del__(self) -> None:
        if hasattr(self, "_drop"):
            self._drop(self._handle)


@functools.cache
def compiled() -> ctypes.PyDLL | None:
    """The compiled code; ``None`` where it cannot be had."""
    library, pointer = load(_SOURCE, *torch_options()), ctypes.c_void_p
    if library is None:
        return None
    library.millstream_make.argtypes, library.millstream_make.restype = [pointer, ctypes.c_size_t], pointer
    library.millstream_drop.argtypes, library.millstream_drop.restype = [pointer], None
    library.millstream_add.argtypes = [pointer, pointer]
    return library


@functools.cache
def _compare(library: ctypes.PyDLL) -> Callable[..., bool]:
    return as_builtin(library, "millstream_compare")
