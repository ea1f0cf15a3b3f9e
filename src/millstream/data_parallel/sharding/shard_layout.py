"""Where rows of several parameters lie while they travel together: a decision about shapes alone.

Memory is one chunk a process, each as long as the others. A chunk has this process's rows of each parameter in turn,
as many as the first process has of it, each from an aligned place on; what the last processes have fewer is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from millstream.data_parallel.buckets import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """What processes have of one parameter.

    Attributes:
        shape: Of the whole.
        num_rows: Of the first process, and of others as long as there are so many left.
        offset: Where they begin in a chunk, in elements.
    """

    shape: tuple[int, ...]
    num_rows: int
    offset: int

    @property
    def row(self) -> int:
        """Elements of a row."""
        return prod(self.shape[1:])

    @property
    def num_padded(self) -> int:
        """Elements that it takes in a chunk."""
        return self.num_rows * self.row

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """The shape of what a process has."""
        num_rows = min(self.num_rows, max(0, self.shape[0] - rank * self.num_rows))
        return num_rows, *self.shape[1:]


@dataclass(frozen=True, slots=True)
class Layout:
    """How some parameters lie in a chunk.

    Attributes:
        rows: Of each parameter.
        chunk: Elements of a chunk.
    """

    rows: tuple[Rows, ...]
    chunk: int


def lay_out(shapes: Sequence[tuple[int, ...]], item_bytes: int, num_processes: int) -> Layout:
    """Divide parameters by rows, as ``torch.chunk`` does.

    Args:
        shapes: Of the wholes; each has a dimension.
        item_bytes: Of an element while it travels.
        num_processes: In all.
    """
    step = ALIGNMENT_BYTES // item_bytes
    rows: list[Rows] = []
    end = 0
    for shape in shapes:
        rows.append(Rows(tuple(shape), -(-shape[0] // num_processes), end))
        end += -(-rows[-1].num_padded // step) * step
    return Layout(tuple(rows), end)
