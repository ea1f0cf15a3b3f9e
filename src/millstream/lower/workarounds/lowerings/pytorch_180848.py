"""Rows keep their length: what is computed has no padded strides.

On GPUs Inductor pads the strides of rows of a kilobyte and more. Whether a buffer has such strides is not decided once:
the question of whether it is contiguous already pads it, and what comes later may decide otherwise, so that a kernel
that reads it through a view reads elsewhere. Seen with sums over several dimensions of what was pooled.
"""

from __future__ import annotations

from functools import partial

from torch._inductor import config

from millstream._torch.workarounds import Workaround

WORKAROUND = Workaround(
    "pytorch#180848",
    "wrong numbers of sums of what was pooled, on GPUs",
    until=(2, 13),
    lowering=partial(config.patch, comprehensive_padding=False),
)
