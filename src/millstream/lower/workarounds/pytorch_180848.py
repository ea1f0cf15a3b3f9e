"""Whether memory is contiguous is asked without a change of its strides.

Inductor gives rows of a kilobyte and more a padded stride. To find out whether a buffer would stay contiguous it pads
it, in the midst of a view, and may later decide on strides without padding: who reads through the view then reads
elsewhere. Seen with sums over several dimensions of what was pooled, on GPUs; on CPUs nothing is padded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch._inductor import ir

from millstream.lower.workarounds.registry import Workaround


def _would_be_contiguous(x: Any) -> bool:
    try:
        _, layout = ir.as_storage_and_layout(x, freeze=False)
    except NotImplementedError:
        return False
    if layout.should_pad_strides():
        layout = copy.copy(layout)
        layout.pad_strides()
    return bool(layout.is_contiguous())


@contextlib.contextmanager
def _ask_of_a_copy() -> Iterator[None]:
    original = ir.is_contiguous_storage_and_layout
    ir.is_contiguous_storage_and_layout = _would_be_contiguous
    try:
        yield
    finally:
        ir.is_contiguous_storage_and_layout = original


WORKAROUND = Workaround(
    "pytorch#180848",
    "wrong numbers of sums of what was pooled, on GPUs",
    until=(2, 13),
    lowering=_ask_of_a_copy,
)
