"""Inductor tunes where the precision of products was set in PyTorch's newer form, ``fp32_precision``.

It asks in the older form what its caches of timings are for, which is an error where the two differ. Here the answer is
then what the newer one says of products on GPUs. Without, nothing is lowered with ``max_autotune``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _ask_in_either_form() -> Iterator[None]:
    original = torch.get_float32_matmul_precision

    def precision() -> str:
        with contextlib.suppress(RuntimeError):
            return original()
        return "high" if torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32" else "highest"

    with replaced(torch, "get_float32_matmul_precision", precision):
        yield


WORKAROUND = Workaround(
    "pytorch#196728",
    "an error on what is tuned where fp32_precision is set",
    lowering=_ask_in_either_form,
)
