"""Overlaps: buffers that share bytes of an arena while both may be in use."""

from __future__ import annotations

from millstream.check.reports import Overlap
from millstream.check.touches import USES, Accesses
from millstream.errors import PlanError
from millstream.graph import MemoryLayout, OwnedRanges, Plan, Role, alignment_of


def find_overlaps(plan: Plan, layout: MemoryLayout, accesses: Accesses | None = None) -> list[Overlap]:
    """Find buffers on the same bytes of ``layout`` of which one is not over before the other is first used.

    Each range of bytes is followed through its owners, in the order in which the host issues their first uses; it is
    enough to compare each owner with the one before it, since happens-before is transitive.

    Args:
        plan: A plan without races.
        layout: Where its temporaries stand.
        accesses: Of the plan, where they are known already.

    Returns:
        One entry per buffer that takes bytes too early and range taken, in host order of the taking.

    Raises:
        PlanError: The layout names what is no temporary of its device, or puts a buffer outside its arena.
    """
    _check_bounds(plan, layout)
    accesses = accesses or Accesses(plan)
    order = accesses.order
    uses = {
        buffer: [use for use in touched if use[1] in USES]
        for buffer, touched in accesses.by_buffer.items()
        if buffer in layout.offset_of
    }
    owners = OwnedRanges()
    overlaps = []
    for buffer in sorted((buffer for buffer in uses if uses[buffer]), key=lambda buffer: uses[buffer][0]):
        first_use = uses[buffer][0]
        start = layout.offset_of[buffer]
        for low, high, owner in owners.take(start, start + plan.graph.buffer_of[buffer].num_bytes, buffer):
            unfinished = [use for use in uses[owner] if not order.before(use[0], first_use[0])]
            if unfinished:
                access = accesses.describe(*unfinished[-1])
                overlaps.append(Overlap(owner, buffer, low, high, access, accesses.describe(*first_use)))
    return overlaps


def check_alignment(plan: Plan, layout: MemoryLayout) -> None:
    """Raise for the first buffer that does not lie as kernels were compiled for.

    Raises:
        PlanError: Its offset is no multiple of ``alignment_of`` the layout's device.
    """
    alignment = alignment_of(layout.device)
    for buffer, offset in layout.offset_of.items():
        if offset % alignment:
            text = f"puts buffer {buffer!r} at byte {offset}: on {layout.device} take multiples of {alignment}"
            raise PlanError(f"the layout of plan {plan.policy!r} {text}", buffer=buffer)


def _check_bounds(plan: Plan, layout: MemoryLayout) -> None:
    for buffer_id, offset in layout.offset_of.items():
        buffer = plan.graph.buffer_of.get(buffer_id)
        if buffer is None or buffer.alias_of is not None:
            what = "unknown buffer" if buffer is None else "view"
            text = f"names {what} {buffer_id!r}: lay out buffers that own memory"
        elif buffer.role is not Role.TEMPORARY:  # inputs are in use before its first step, outputs after its last
            text = f"names {buffer.role} {buffer_id!r}: lay out temporaries, others are in use beyond the plan"
        elif buffer.device != layout.device:
            text = f"puts buffer {buffer_id!r} of {buffer.device} on {layout.device}: lay out each device by itself"
        elif offset < 0 or offset + buffer.num_bytes > layout.arena_bytes:
            place = f"bytes {offset} to {offset + buffer.num_bytes}"
            text = f"puts buffer {buffer_id!r} at {place}, outside its arena of {layout.arena_bytes} bytes"
        else:
            continue
        raise PlanError(f"the layout {text}", buffer=buffer_id)
