"""Worker threads of this process, which play the streams of plans on the CPU.

- A worker is made when a plan first needs it, is a daemon, and stays for the process's life: there are never more than
  the widest plan has streams, less one, because the calling thread is stream 0. It lives in compiled code, without the
  GIL, and waits without using a core, except for the first 0.4 ms after a job.
- One call at a time has the pool (``busy``). A call that finds it busy must do without, and never waits for it: so
  neither several callers nor a kernel that calls into another program can lock each other out.
- A forked child has a pool of its own, without workers at first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from millstream import _native
from millstream._torch.tensors import place_of_implementation
from millstream.errors import InternalError


class Library:
    """The compiled code of this engine, in some ten seconds at its first use, and kept in the cache folder.

    Attributes:
        holding: Its functions, called with the GIL.
        releasing: Those that run long, without.
    """

    def __init__(self, path: Path) -> None:
        self.holding, self.releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for name in ("make", "make_worker", "get"):
            getattr(self.holding, f"millstream_{name}").restype = ctypes.c_void_p
        self.holding.millstream_take_error.restype = ctypes.py_object

    def __getattr__(self, name: str) -> Any:
        self.__dict__[name] = function = getattr(self.holding, f"millstream_{name}")
        return function


@functools.cache
def find_library() -> Library | None:
    """The compiled code, or ``None`` where it cannot be had."""
    path = _native.find("threads")
    return None if path is None or place_of_implementation() is None else Library(path)


def library() -> Library:
    """The compiled code.

    Raises:
        InternalError: It cannot be had.
    """
    found = find_library()
    if found is None:
        raise InternalError("There is no compiler for what the threads run.")
    return found


class WorkerPool:
    """Worker threads.

    Attributes:
        busy: Held by the one call that the pool works for.
    """

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self._workers: list[int] = []

    def workers(self, number: int) -> ctypes.Array[ctypes.c_void_p]:
        """Handles of so many workers."""
        while len(self._workers) < number:
            worker = library().make_worker()
            self._workers.append(worker)
            name = f"millstream-stream-{len(self._workers)}"
            threading.Thread(target=_serve, args=(worker,), name=name, daemon=True).start()
        return (ctypes.c_void_p * number)(*self._workers[:number])


def _serve(worker: int) -> None:
    torch.set_grad_enabled(False)  # for steps in Python: a new thread knows nothing of that
    library().releasing.millstream_serve(ctypes.c_void_p(worker))


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Let PyTorch's operators, and kernels that go by OpenMP's number, use so many threads on this thread alone."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    of_mkl = library().use_threads(number, number)
    try:
        yield
    finally:
        library().use_threads(before, of_mkl)


_pool = WorkerPool()


def worker_pool() -> WorkerPool:
    """The pool of this process."""
    return _pool


def _start_afresh_after_fork() -> None:
    global _pool  # noqa: PLW0603
    _pool = WorkerPool()  # threads do not survive a fork, and a call may have been in flight


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
