"""Branches of a graph stay apart: for placement on several devices.

TorchInductor fuses kernels that do not depend on each other where they read the same. The first kernel of one tower may
so become a part of a late kernel of another: then towers can neither begin at the same time nor be on two devices.
``devices=`` rules that out, as ``options={"joint_branches": False}`` and ``MILLSTREAM_WITHOUT=joint-branches`` do.

Private APIs of Inductor's scheduler; tried on torch 2.13 (``can_fuse``, ``ancestors``, ``is_extern``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.scheduler import Scheduler

from millstream._torch.workarounds import is_off, replaced

SWITCH = "joint-branches"
"""What ``devices=`` does without."""


@contextlib.contextmanager
def branches_apart() -> Iterator[None]:
    """Fuse kernels that don't depend on each other only where they come after the same library kernels, if asked to.

    Not for several threads at once: Inductor itself compiles under one lock.
    """
    if not is_off(SWITCH):
        yield
        return
    may_fuse = Scheduler.can_fuse
    libraries: WeakKeyDictionary[Scheduler, frozenset[str]] = WeakKeyDictionary()

    def may_fuse_within(self: Scheduler, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        if self not in libraries:
            found = (node for node in self.nodes if node.is_extern() or node.is_template())
            libraries[self] = frozenset(name for node in found for name in node.get_operation_names())
        is_apart = (
            not node1.get_operation_names() & node2.ancestors
            and not node2.get_operation_names() & node1.ancestors
            and libraries[self] & node1.ancestors != libraries[self] & node2.ancestors
        )
        return not is_apart and may_fuse(self, node1, node2, *args, **kwargs)

    with replaced(Scheduler, "can_fuse", may_fuse_within):
        yield
