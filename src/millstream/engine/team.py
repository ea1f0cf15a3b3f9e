"""Worker threads of this process, which play the streams of plans on the CPU.

- A worker is made when a plan first needs it, is a daemon, waits without using a core, and stays for the process's
  life: there are never more than the widest plan has streams, less one, because the calling thread is stream 0.
- One call at a time has the team (``busy``). Who finds it busy must do without, and never waits for it: so neither
  several callers nor a kernel that calls into another program can lock each other out.
- A forked child has a team of its own, without workers at first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Job = Callable[[], None]


class Team:
    """Worker threads.

    Attributes:
        busy: Held by the one call that the team works for.
    """

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job], num_threads: int) -> None:
        """Run jobs at the same time, the first one on the calling thread; return when all are over.

        Args:
            jobs: They see to their errors themselves.
            num_threads: Intra-op threads for each of the others; the calling thread keeps its own.
        """
        while len(self._workers) < len(jobs) - 1:
            self._workers.append(_Worker(len(self._workers) + 1))
        is_inference = torch.is_inference_mode_enabled()
        started: list[_Worker] = []
        try:
            for worker, job in zip(self._workers, jobs[1:], strict=False):
                started.append(worker)
                worker.start(job, num_threads, is_inference)
            jobs[0]()
        finally:
            for worker in started:
                worker.join()


class _Worker:
    def __init__(self, number: int) -> None:
        self._ready, self._done = threading.Lock(), threading.Lock()  # each is opened by one side, shut by the other
        self._ready.acquire()
        self._done.acquire()
        self._job: tuple[Job, int, bool] | None = None
        threading.Thread(target=self._serve, name=f"millstream-stream-{number}", daemon=True).start()

    def start(self, job: Job, num_threads: int, is_inference: bool) -> None:
        self._job = (job, num_threads, is_inference)
        self._ready.release()

    def join(self) -> None:
        """Wait for the job's end, come what may: it works in the caller's memory."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._done.acquire()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # kernels are called below autograd; a new thread knows nothing of that
        while True:
            self._ready.acquire()
            assert self._job is not None, "a job comes before its start"
            job, num_threads, is_inference = self._job
            self._job = None
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            if is_inference:
                with torch.inference_mode():
                    job()
            else:
                job()
            del job  # and with it the caller's tensors
            self._done.release()


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Let PyTorch's operators, and kernels that go by OpenMP's number, use so many threads on this thread.

    PyTorch notes the number for threads to come as well, workers included; both are afterwards what they were.
    """
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_team = Team()


def team() -> Team:
    """The team of this process."""
    return _team


def _start_afresh_after_fork() -> None:
    global _team  # noqa: PLW0603
    _team = Team()  # threads do not survive a fork, and a call may have been in flight


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
