"""Where several parameters lie while they travel together: a decision about shapes alone.

Each parameter lies whole, from an aligned place on: the rows of the first process, then those of the next, each as many
as the first has; what the last ones have fewer is left over at its end. So what is gathered need not be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from millstream.data_parallel.buckets import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """One parameter, by processes.

    Attributes:
        shape: Of the whole.
        num_rows: Of the first process, and of others as long as there are so many left.
        offset: Where it begins, in elements.
        own: Where the rows of a process begin in memory for its own rows of all parameters.
    """

    shape: tuple[int, ...]
    num_rows: int
    offset: int
    own: int

    @property
    def num_padded(self) -> int:
        """Elements of a process."""
        return self.num_rows * prod(self.shape[1:])

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """The shape of what a process has."""
        num_rows = min(self.num_rows, max(0, self.shape[0] - rank * self.num_rows))
        return num_rows, *self.shape[1:]


@dataclass(frozen=True, slots=True)
class Layout:
    """How some parameters lie in memory.

    Attributes:
        rows: Of each parameter.
        num_elements: Of memory for the wholes.
        num_own: Of memory for a process's own rows.
    """

    rows: tuple[Rows, ...]
    num_elements: int
    num_own: int


def lay_out(shapes: Sequence[tuple[int, ...]], item_bytes: int, num_processes: int) -> Layout:
    """Divide parameters by rows, as ``torch.chunk`` does.

    Args:
        shapes: Of the wholes; each has a dimension.
        item_bytes: Of an element while it travels.
        num_processes: In all.
    """
    step = ALIGNMENT_BYTES // item_bytes
    rows: list[Rows] = []
    end = own = 0
    for shape in shapes:
        rows.append(Rows(tuple(shape), -(-shape[0] // num_processes), end, own))
        end += -(-rows[-1].num_padded * num_processes // step) * step
        own += -(-rows[-1].num_padded // step) * step
    return Layout(tuple(rows), end, own)
