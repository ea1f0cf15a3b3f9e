"""Which part of each bucket is whose: a decision about sizes alone, which every process makes for all of them.

A bucket is divided into as many equal chunks as there are processes, wherever parameters begin. So a process has some
parameters whole, parts of at most two in each bucket, and nothing of the rest; and however large one parameter is, all
have as much to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millstream.data_parallel.buckets import ALIGNMENT_BYTES, Bucket


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process has of one parameter: never nothing.

    Attributes:
        member: Number of the parameter in its bucket.
        start: First element, as the parameter's memory counts them.
        stop: After the last one.
        offset: Where it begins in the bucket.
        is_whole: Whether it is all of the parameter.
    """

    member: int
    start: int
    stop: int
    offset: int
    is_whole: bool


def pad(bucket: Bucket, item_bytes: int, num_processes: int) -> Bucket:
    """The same bucket, as long as can be divided into chunks that begin at aligned places."""
    step = num_processes * ALIGNMENT_BYTES // item_bytes
    return replace(bucket, num_elements=-(-bucket.num_elements // step) * step)


def pieces_of(bucket: Bucket, lengths: Sequence[int], rank: int, num_processes: int) -> list[Piece]:
    """What a process has of a padded bucket.

    Args:
        bucket: Padded.
        lengths: Elements of each member.
        rank: Of the process.
        num_processes: In all.
    """
    chunk = bucket.num_elements // num_processes
    first, end = rank * chunk, (rank + 1) * chunk
    pieces: list[Piece] = []
    for member, (offset, length) in enumerate(zip(bucket.offsets, lengths, strict=True)):
        start, stop = max(first - offset, 0), min(end - offset, length)
        if start < stop:
            pieces.append(Piece(member, start, stop, offset + start, (start, stop) == (0, length)))
    return pieces
