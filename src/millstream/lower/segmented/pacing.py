"""Delay collectives that bring something to be used, and take memory from then on: as late as hides them.

What is gathered for a part of a model travels while the part before it is computed, and no earlier: so as little of
the model is whole at a time as can be.

**Contract**
- Collectives stay in their order, which is that of all processes.
- Each kernel reads what it read before.
- ``MILLSTREAM_WITHOUT=pacing`` has all of them begin as soon as they can.

**Steps**
1. A collective is to begin right before the first kernel that uses what the one before it has brought.
2. None goes past a kernel that writes what it sends, nor past the next collective.
3. It reads a mark that the kernel before its place writes, a buffer without bytes, so that no schedule puts it earlier;
   if it read one of that kernel's results, a kernel that goes on in that memory would wait for the collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millstream._torch.workarounds import is_off
from millstream.graph import Kernel


@dataclass(frozen=True, slots=True)
class Travel:
    """A collective among kernels.

    Attributes:
        kernel: Its position.
        memory: The buffer in which it travels.
        copy: Position of the kernel that copies its values there; ``None`` where others write them.
        is_paced: Whether it is to begin no earlier than needed.
    """

    kernel: int
    memory: str
    copy: int | None
    is_paced: bool


def pace(
    kernels: Sequence[Kernel], travels: Sequence[Travel], storage: Callable[[str], str]
) -> tuple[list[Kernel], tuple[int, ...], tuple[str, ...]]:
    """Put collectives where they are to begin.

    Args:
        kernels: In an order in which they may run.
        travels: The collectives among them, in their order.
        storage: The buffer in whose memory a buffer lies.

    Returns:
        The kernels in their new order, for each its position before, and the marks: buffers that the graph is to have.
    """
    before = _places(kernels, travels, storage)
    moved = {position for each in before.values() for position in each}
    travelling = {position for each in travels for position in (each.kernel, each.copy)}
    order: list[int] = []
    marks: list[str] = []
    last: int | None = None  # where the last kernel that computes stands now
    result: list[Kernel] = []
    for position, kernel in enumerate(kernels):
        late = before.get(position, ())
        reads: tuple[str, ...] = ()
        if late and last is not None:
            reads = (f"mark{len(marks)}",)
            marks += reads
            result[last] = replace(result[last], writes=(*result[last].writes, *reads))
        for each in late:
            result.append(replace(kernels[each], id=len(result), reads=(*kernels[each].reads, *reads)))
            order.append(each)
        if position not in moved:
            if position not in travelling:
                last = len(result)
            result.append(replace(kernel, id=len(result)))
            order.append(position)
    return result, tuple(order), tuple(marks)


def _places(
    kernels: Sequence[Kernel], travels: Sequence[Travel], storage: Callable[[str], str]
) -> dict[int, list[int]]:
    """By position of a kernel, those that are put before it."""
    if is_off("pacing"):
        return {}
    readers: dict[str, list[int]] = defaultdict(list)
    writers: dict[str, list[int]] = defaultdict(list)
    for position, kernel in enumerate(kernels):
        for name in {*map(storage, kernel.reads)}:
            readers[name].append(position)
        for name in {*map(storage, kernel.writes)}:
            writers[name].append(position)
    targets: dict[Travel, int] = {}
    previous: int | None = None  # where what was brought last is used first
    for each in travels:
        if not each.is_paced or each.copy is None:
            continue
        use = next((position for position in readers[storage(each.memory)] if position > each.kernel), len(kernels))
        sources = {storage(name) for name in kernels[each.copy].reads}
        written = [position for name in sources for position in writers[name] if position > each.copy]
        if previous is not None:
            targets[each] = min(previous, use, *written)
        previous = use
    places: dict[int, list[int]] = {}
    limit = len(kernels)
    for each in reversed(travels):
        limit = min(limit, targets.get(each, each.kernel))
        if each in targets and each.copy is not None and limit > each.kernel:
            places.setdefault(limit, [])[:0] = [each.copy, each.kernel]
        else:
            limit = min(limit, each.kernel)
    return places
