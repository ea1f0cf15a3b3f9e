"""Compare tensors with earlier ones in compiled code: see ``_native/batches.cpp``.

Without compiled code, Python looks at each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from millstream import _native


class TensorSpecs:
    """The forms of some tensors, so that others can be compared with them.

    Args:
        leaves: Strided tensors of PyTorch's own class.
        place: Of the pointer to the implementation in a Python tensor, in bytes; ``None`` if it is not known.

    Raises:
        ValueError: Nothing can be compared with these, or there is no compiled code.
    """

    def __init__(self, leaves: Sequence[Tensor], place: int | None) -> None:
        tensors = _native.load("tensors")
        if tensors is None or place is None:
            raise ValueError("There is no compiled code.")
        self._blank = array("Q", bytes(8 * len(leaves)))
        (self._compare,) = tensors.make_specs(Tensor, place, list(leaves))

    def find(self, leaves: list[Any]) -> array[int] | None:
        """The addresses of leaves that look the same, no two with a storage in common; ``None`` where they do not."""
        addresses = self._blank[:]
        return addresses if self._compare(leaves, addresses.buffer_info()[0]) else None
