"""Keep reads of memory that is written in place after the write.

Inductor gives such memory another name after each write, and each kernel depends on names. Where the loops of two C++
kernels are made alike so that they can be fused, what they read is found out again, and by the first name: the kernel
may then be moved before the write, silently. It is so for gradients that are scattered into zeros, as those of nearest
upsampling in a diffusion model's U-Net, or of max pooling (VGG). 2.11 also drops dependencies here that no name shows
(pytorch#177816).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _keep_names() -> Iterator[None]:
    """Keep the names, and what else is not found out again."""
    recompute = SchedulerNode.recompute_size_and_body

    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        added = [each for each in self.read_writes.reads if isinstance(each, WeakDep | StarDep)]
        recompute(self, *args, **kwargs)
        for each in added:
            self.set_read_writes(self.read_writes.with_read(each))
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    with replaced(SchedulerNode, "recompute_size_and_body", recompute_and_rename):
        yield


WORKAROUND = Workaround(
    "pytorch#185873",
    "wrong gradients of upsampling and max pooling, on CPUs",
    since=(2, 13),
    until=(2, 14),
    lowering=_keep_names,
)
