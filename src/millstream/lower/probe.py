"""What Inductor asks the C++ compiler before it generates a first kernel for the processor, asked early.

To know which vector instructions there are, it compiles and loads up to ten small programs and waits for each: 20 s on
a fresh machine of two cores, 3 s where they are compiled already. That needs one core, and tracing needs another.

Private APIs of Inductor; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch


def ask_early(inputs: Iterable[Any]) -> None:
    """Let Inductor find out in a thread of its own, if it is about to compile for the processor.

    Args:
        inputs: Of what will be compiled; all that is no tensor is passed over.
    """
    if {value.device.type for value in inputs if isinstance(value, torch.Tensor)} == {"cpu"}:
        _ask_once()


@functools.cache
def _ask_once() -> None:
    # Imported here: two threads that import modules which import each other may see one of them unfinished.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

    def ask() -> None:
        with suppress(Exception):  # who needs the answer asks again, and gets the error
            cpu_vec_isa.valid_vec_isa_list()

    with suppress(RuntimeError):  # the system refuses the thread
        threading.Thread(target=ask, name="millstream-probe", daemon=True).start()
