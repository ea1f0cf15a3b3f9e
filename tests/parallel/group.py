"""Processes that train together: started once, they run one check after another, and are killed when one hangs.

As a program, ``python -m tests.parallel.group rank size store backend``, it is one of them.
"""

import faulthandler
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

from tests.clocks import HANG_S

DEADLINE = 2 * HANG_S
"""Seconds that a check may take; with more than four processes, longer by as much."""

PROGRAMS = "MILLSTREAM_TEST_PROGRAMS"
"""The environment variable that tells a process the folder of programs."""

TIMEOUT = timedelta(seconds=HANG_S)
"""After which a process that waits for another gives up."""


class Group:
    """Some processes with a process group of Gloo's on the CPU, or of NCCL's with a GPU each.

    Args:
        size: How many.
        backend: Of the process group.
        programs: A folder where each finds the graphs that were lowered before in this run; ``None`` for nowhere.
        environment: Of theirs alone.
    """

    def __init__(self, size, backend="gloo", programs=None, **environment):
        if programs is not None:
            environment |= {"MILLSTREAM_WARM_START": "1", PROGRAMS: str(programs)}
        self.backend, self._environment = backend, environment
        self.size, self._processes, self._answers = size, [], queue.Queue()
        self._deadline = DEADLINE * max(1, size / 4)

    def run(self, check, *args):
        """Run a function of a module of checks in all processes, and return what each of them returns."""
        self.start_check(check, *args)
        return self.finish_check()

    def start_check(self, check, *args):
        if not self._processes:
            self._start()
        for process in self._processes:
            process.stdin.write(json.dumps([check.__module__, check.__name__, *args]) + "\n")
            process.stdin.flush()

    def finish_check(self, without=()):
        answers, end = {}, time.monotonic() + self._deadline
        while len(answers) < self.size - len(without):
            try:
                rank, answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.kill()
                raise AssertionError(f"No answer within {self._deadline:.0f} s; there are {answers}") from None
            if rank not in without:
                answers[rank] = answer
        failures = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if failures:
            if len(failures) < self.size:  # they may be at different places now
                self.kill()
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(failures.items())))
        return [answers[rank]["result"] for rank in sorted(answers)]

    def kill_one(self, rank):
        os.kill(self._processes[rank].pid, signal.SIGKILL)

    def wait_for_ends(self):
        """Exit codes of all processes, which end by themselves."""
        return [process.wait(DEADLINE) for process in self._processes]

    def kill(self):
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._processes, self._answers = [], queue.Queue()

    def _start(self):
        store = tempfile.mktemp(prefix="store")  # the processes make it
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | self._environment
        for rank in range(self.size):
            command = [sys.executable, "-m", "tests.parallel.group", str(rank), str(self.size), store, self.backend]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process.stdout, self._answers), daemon=True).start()

    @staticmethod
    def _listen(rank, stream, answers):
        try:
            for line in stream:
                answers.put((rank, json.loads(line)))
        except ValueError:  # closed
            return
        answers.put((rank, {"error": "the process has ended"}))


def main(rank, size, store, backend):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what checks print
    import torch
    import torch.distributed as dist

    from tests.parallel import checks

    torch.set_num_threads(1)
    if PROGRAMS in os.environ:
        from millstream.lower.kept import program_files

        program_files.cache_folder = lambda: Path(os.environ[PROGRAMS])
    if backend == "nccl":
        checks.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=size, init_method=f"file://{store}", timeout=TIMEOUT)
    for line in sys.stdin:
        module, name, *args = json.loads(line)
        faulthandler.dump_traceback_later(0.8 * TIMEOUT.total_seconds())  # tells where a process hangs
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(rank, *args)}
        except BaseException:  # noqa: BLE001  the test shows it
            answer = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
