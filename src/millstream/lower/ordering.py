"""What reads memory that is written in place stays behind the write.

Inductor gives such memory another name behind each write, and each kernel depends on names. Where the loops of two C++
kernels are made alike so that they can be fused, what they read is found out anew, and by the first name: the kernel
may then be moved in front of the write, silently. It is so for gradients that are scattered into zeros, as those of
nearest upsampling in a diffusion model's U-Net, or of max pooling (VGG): pytorch/pytorch#185873, mended behind 2.13,
and #177816, behind 2.11.

Private API of Inductor's scheduler; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode


@contextlib.contextmanager
def writes_stay_in_front() -> Iterator[None]:
    """Keep the names, and what else is not found out anew. Not for several threads at once, as ``shortcuts``."""
    recompute = SchedulerNode.recompute_size_and_body

    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        added = [each for each in self.read_writes.reads if isinstance(each, WeakDep | StarDep)]
        recompute(self, *args, **kwargs)
        for each in added:
            self.set_read_writes(self.read_writes.with_read(each))
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]
