"""Kernels that reduce rows and columns at once lose what they reduce into a part of a concatenation.

Large layer norms have such kernels in the backward pass, from 2.10 on. (Our converter rejects them anyhow; without the
FX wrapper, where a graph runs on plain Inductor, they would be taken.)
"""

from __future__ import annotations

from millstream._torch.workarounds import Workaround

WORKAROUND = Workaround(
    "pytorch#193061",
    "wrong gradients of layer norms that share a parameter, on GPUs",
    options={"triton.mix_order_reduction": False},
)
