"""Begin early, while a step is traced, what Inductor does before its first kernel: tracing needs one core.

- For the processor it asks the C++ compiler which vector instructions there are: it compiles and loads up to ten small
  programs and waits for each, 20 s on a fresh machine of two cores, 3 s where they are compiled already.
- For a GPU it starts processes that compile and load kernels. Until they are there, which takes seconds, it loads one
  kernel after another itself: of a step that was found on disk, all of them.

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
    """Let Inductor begin, in a thread or processes of its own.

    Args:
        inputs: Of what will be compiled; all that is no tensor is passed over.
    """
    devices = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    if devices == {"cpu"}:
        _ask_once()
    elif "cuda" in devices:
        _wake_workers()


def _wake_workers() -> None:
    from torch._inductor.async_compile import AsyncCompile

    with suppress(Exception):  # then they start when Inductor itself needs them
        AsyncCompile.wakeup()


@functools.cache
def _ask_once() -> None:
    # Imported here: two threads that import modules which import each other may see one of them unfinished.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

    def ask() -> None:
        with suppress(Exception):  # code that needs the answer asks again, and gets the error
            cpu_vec_isa.valid_vec_isa_list()

    with suppress(RuntimeError):  # the system refuses the thread
        threading.Thread(target=ask, name="millstream-probe", daemon=True).start()
