"""One of the sizes of a program that serves many."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SIZES = 20  # of a program, of which a line is shown


@dataclass(frozen=True)
class OneSize:
    """One of the sizes that a program serves.

    Attributes:
        program: Number of the program.
        values: Of its symbols.
        calls: How many calls had this size.
        shared_bytes: The memory that sizes of the program have in turn.
        own_bytes: What this one holds beside that.
        object_bytes: About what its CUDA graph takes.
        is_planned: It has a plan of its own, as a size has that was called some times.
        num_untold: How many sizes of the program have no report, being called more rarely.
    """

    program: int
    values: tuple[int, ...]
    calls: int
    shared_bytes: int = 0
    own_bytes: int = 0
    object_bytes: int = 0
    is_planned: bool = True
    num_untold: int = 0
