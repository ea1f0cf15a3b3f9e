"""Decide which gradients travel together, by the parameters alone, and so alike in every process.

No plan, shape or timing has a say in it: a process that replays a graph, one that captures and one that runs plain
Python issue the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

CAP_BYTES = 25 * 2**20
"""Of a bucket, as in DistributedDataParallel: large enough for the full bandwidth of a network."""

LAST_BYTES = 2**20
"""Of the bucket that is complete last, whose way nothing hides."""

ALIGNMENT_BYTES = 256
"""Each gradient begins at a multiple of it, as an allocation of its own would."""


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor that travels.

    Attributes:
        kind: What only tensors have in common that may travel together: their dtype and device.
        num_elements: Of the memory it takes.
        item_bytes: Bytes of an element.
    """

    kind: Hashable
    num_elements: int
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a bucket, with what follows it to the next multiple of the alignment."""
        return -(-self.num_elements * self.item_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        members: Their positions, in the order in which they lie in the bucket.
        offsets: Where each begins, in elements.
        num_elements: Of the whole bucket.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    num_elements: int


def plan_buckets(members: Sequence[Member], cap_bytes: int = CAP_BYTES, last_bytes: int = LAST_BYTES) -> list[Bucket]:
    """Put every member into one bucket with others of its kind.

    Gradients are ready in the reverse order of the parameters, roughly, so the first bucket has the last parameters.
    The bucket of the first parameters, which is ready last, is small.

    Args:
        members: In the order of the parameters.
        cap_bytes: A bucket that has so much is closed.
        last_bytes: Likewise, of the last one.

    Returns:
        Buckets in the order in which they travel.
    """
    open_ones: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    caps: dict[Hashable, int] = {}
    for position, member in enumerate(members):
        open_ones.setdefault(member.kind, []).append(position)
        filled[member.kind] = filled.get(member.kind, 0) + member.num_bytes
        if filled[member.kind] >= caps.get(member.kind, min(last_bytes, cap_bytes)):
            closed.append(open_ones.pop(member.kind))
            filled[member.kind] = 0
            caps[member.kind] = cap_bytes
    closed += open_ones.values()
    closed.sort(key=min, reverse=True)
    return [_lay_out(positions[::-1], members) for positions in closed]


def _lay_out(positions: Sequence[int], members: Sequence[Member]) -> Bucket:
    offsets: list[int] = []
    end = 0
    for position in positions:
        offsets.append(end)
        end += members[position].num_bytes // members[position].item_bytes
    return Bucket(tuple(positions), tuple(offsets), end)
