"""Which kernels may read some of their arguments before the kernel in front of them on their stream has ended.

A kernel that starts early shares the device with the one in front of it, which has waited for all that it comes behind
before it let anybody start. So what was written before that one *began* is there, and what it writes itself, or what
the kernel waits for beside it, may not be.

``lower.convolutions.early_reads`` has the other half.
"""

from __future__ import annotations

from millstream.graph import HappensBefore, KernelKind, Launch, Plan
from millstream.lower.program import Program


def find_early_reads(program: Program, plan: Plan) -> frozenset[int]:
    """Kernels all of whose early reads were written before the kernel in front on their stream began.

    O(steps + waits x streams) time.

    Args:
        program: What the kernels call.
        plan: Of its kernels.
    """
    candidates = {kernel for kernel, call in enumerate(program.calls) if call.early}
    if not candidates:
        return frozenset()
    graph, order = program.graph, HappensBefore(plan)
    written: dict[str, list[int]] = {}  # storage -> positions of the kernels that write it
    in_front: dict[int, tuple[int, int]] = {}  # stream -> the last kernel there, and its position
    found = set()
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Launch):
            continue
        if step.kernel in candidates and step.stream in in_front:
            kernel, began = in_front[step.stream]
            names = {graph.storage(program.base(name)) for name in program.calls[step.kernel].early or ()}
            waited = graph.kernels[kernel].kind is KernelKind.FUSED or program.calls[kernel].early is not None
            if waited and all(order.before(each, began) for name in names for each in written.get(name, ())):
                found.add(step.kernel)
        for name in graph.kernels[step.kernel].writes:
            written.setdefault(graph.storage(name), []).append(position)
        in_front[step.stream] = step.kernel, position
    return frozenset(found)
