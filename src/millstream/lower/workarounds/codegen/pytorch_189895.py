"""What is read at a condition is 0, or another given value, where the condition does not hold, whoever computed it.

In a Triton kernel a conditional read is a load with a mask. Where the kernel itself has just computed what is read,
nothing is loaded, and Inductor forgets the mask: an average pool over images of one pixel, fused with the norm before
it, adds up nine pixels instead of one; padded sums have the sum for their padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.codegen.triton import TritonKernelOverrides
from torch._inductor.virtualized import V
from torch._inductor.virtualized import _ops as ops

from millstream._torch.workarounds import Workaround, replaced


def _is_computed_here(body: Any) -> bool:
    """Return whether all that a body does is to read what its kernel has computed."""
    kernel: Any = V.kernel
    results = [arg for node in body.graph.find_nodes(op="output") for arg in node.args]
    return any(arg.target == "load" and arg.args[1] in kernel.cse.store_cache for arg in results)


@contextlib.contextmanager
def _choose_what_is_computed() -> Iterator[None]:
    original = TritonKernelOverrides.masked

    def masked(mask: Any, body: Any, other: Any) -> Any:
        is_computed = _is_computed_here(body)
        result = original(mask, body, other)
        return ops.where(mask, result, ops.constant(other, result.dtype)) if is_computed else result

    with replaced(TritonKernelOverrides, "masked", staticmethod(masked)):
        yield


WORKAROUND = Workaround(
    "pytorch#189895",
    "wrong numbers of padding, and of pools over one pixel, fused with what they read, on GPUs",
    lowering=_choose_what_is_computed,
)
