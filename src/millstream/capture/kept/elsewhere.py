"""A step's graph lowered by another process while calls run as plain Python: a large one, or ``tune="background"``.

**Contract**
- Nothing but the time of day decides when the graph takes over; what it computes is what lowering here would give.
- The other process is given plain data: the graph, its inputs without their values, and what lowering depends on. What
  it makes goes to disk, where this process finds it; what cannot be told in this way is lowered here, as ever.
- One such process at a time. It ends with this one, and no signal of a terminal reaches it.
- Where it fails, or what it made is not found, the graph is lowered here.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from millstream._torch.modes.switches import remember
from millstream.cache import cache_folder, is_private
from millstream.capture.kept.descriptions import TraceNotKept
from millstream.capture.kept.graph_data import Fakes, decode_graph, describe_tensor, encode_graph
from millstream.capture.kept.pickling import PlainPickler
from millstream.capture.trace.request import NotYet
from millstream.locks import ForkSafeLock
from millstream.lower.kept.program_files import ProgramFile

LOGGER = logging.getLogger("millstream")
MODULE = "millstream.capture.step.lowering_worker"
CONFIGS = {"inductor": inductor_config, "functorch": functorch_config}

LARGE = 1000
"""Operators of a graph that takes half a minute or more to be lowered for a GPU: ResNet-50's, 60 s, has 1,131."""
LEAST_CORES = 4  # else the other process would take what the loop needs
LEAST_FREE_BYTES = 2 << 30  # of the GPU: for the context of another process, with something left
LIMIT_S = 1800.0  # of a job; what takes longer is lowered by the call

_here = threading.local()


class Job:
    """Another process that lowers a graph.

    Args:
        path: Of the file that describes the graph; the process removes it.

    Attributes:
        since: Seconds of ``time.monotonic`` when it began.
    """

    def __init__(self, path: Path) -> None:
        self.since = time.monotonic()
        self._pid = os.getpid()
        try:
            self._process = _start(path, self._pid)
        except BaseException:
            remove(path)
            raise
        self._end = weakref.finalize(self, _end, self._process, self._pid, path)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or takes so long that something must hold it up.

        To a forked child, for which it would not be there any more, it has.
        """
        if os.getpid() != self._pid or self._process.poll() is not None:
            return True
        return time.monotonic() - self.since > LIMIT_S

    def stop(self) -> None:
        """End it, unless it has ended, and log what it failed for."""
        self._end()


def _start(path: Path, pid: int) -> subprocess.Popen[bytes]:
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(path), str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """The variables of this process, with the folders that this package and PyTorch come from."""
    folders = map(str, (Path(__file__).parents[3], Path(str(torch.__file__)).parents[1]))
    path = [*dict.fromkeys(folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _end(process: subprocess.Popen[bytes], pid: int, path: Path) -> None:
    if os.getpid() != pid:
        return
    log = path.with_suffix(".log")
    if (code := process.poll()) is None:
        with suppress(OSError):  # with the processes that compile for it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    elif code:
        said = f"it ended with status {code}"  # less than 0: by this signal
        with suppress(OSError):
            said = log.read_text(errors="replace").strip().rpartition("\n")[2] or said
        LOGGER.info("not compiled in the background: %s", said)
    remove(path)


def remove(path: Path) -> None:
    """Remove the file that describes a graph, and what the process has said."""
    for each in (path, path.with_suffix(".log")):
        each.unlink(missing_ok=True)


@contextmanager
def at_once() -> Iterator[None]:
    """Have this thread lower graphs itself."""
    before = getattr(_here, "lowers", False)
    _here.lowers = True
    try:
        yield
    finally:
        _here.lowers = before


def takes_long(gm: fx.GraphModule) -> bool:
    """Whether a graph takes so long to be lowered, for a GPU, that it is worth another process, which has room here."""
    if sum(node.op == "call_function" for node in gm.graph.nodes) < LARGE:
        return False
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    device = next((value.device for value in values if isinstance(value, Tensor) and value.is_cuda), None)
    if device is None or len(os.sched_getaffinity(0)) < LEAST_CORES:
        return False
    return torch.cuda.mem_get_info(device)[0] >= LEAST_FREE_BYTES


class Lowering:
    """The lowering of one graph, which may happen elsewhere.

    Made before the options of TorchInductor become those that the graph is lowered with.

    Args:
        gm: The graph.
        inputs: Its example inputs.
        static: As of ``Build``.
        name: Of the program, for people.
        options: Of TorchInductor, the user's.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        static: frozenset[int],
        name: str,
        options: dict[str, Any] | None,
    ) -> None:
        self._gm, self._inputs = gm, inputs
        self._facts: dict[str, Any] = {"static": static, "name": name, "options": options}
        self._facts |= {"switches": _switches(), "configs": _configs()}

    def begin(self, record: ProgramFile) -> None:
        """Let another process lower the graph, unless one has tried to.

        Args:
            record: Where the program will be.

        Raises:
            NotYet: It does so now, or lowers another graph first.
        """
        if getattr(_here, "lowers", False):
            return
        with _jobs.lock:
            if (running := _jobs.running()) is not None:
                raise NotYet(running)
            if record.digest in _jobs.tried:
                return
            _jobs.tried.add(record.digest)
            try:
                path = _write({**self._facts, "digest": record.digest, **_describe(self._gm, self._inputs)})
                job = Job(path)
            except Exception as reason:  # noqa: BLE001  what cannot be told is lowered here
                LOGGER.info("not compiled in the background: %s", reason)
                return
            _jobs.latest = weakref.ref(job)
            raise NotYet(job)


class _Jobs(ForkSafeLock):
    """The jobs of this process; to a forked child they are over."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[str] = set()  # digests
        self.latest: weakref.ref[Job] | None = None

    def running(self) -> Job | None:
        job = None if self.latest is None else self.latest()
        return None if job is None or job.is_over else job


_jobs = _Jobs()


# --- the description of a graph ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A graph to be lowered, made again of its description.

    Attributes:
        gm: The graph.
        inputs: Of it, without values.
        facts: What else was described.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    facts: dict[str, Any]


def read(path: Path) -> Task:
    """Read the description of a graph, and remove it."""
    if not is_private(path.parent) or not is_private(path):
        raise PermissionError(f"{path} can be written by others")
    facts = pickle.loads(path.read_bytes())  # noqa: S301  of this user, in a folder that nobody else can write
    path.unlink()
    fakes = Fakes()
    made: dict[int, Tensor] = {}
    inputs = []
    for number, place, spec in facts.pop("inputs"):
        if number not in made:
            made[number] = fakes.make(place, *spec)
        inputs.append(made[number])
    return Task(decode_graph(facts.pop("graph"), fakes), inputs, facts)


def _describe(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    memory: dict[int, int] = {}
    same: dict[int, int] = {}
    described = []
    for value in inputs:
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TraceNotKept(f"an input is a {type(value).__name__}")
        described.append((same.setdefault(id(value), len(same)), *describe_tensor(value, memory)))
    return {"graph": encode_graph(gm), "inputs": described}


def _switches() -> list[Any]:
    return [value for _, value in remember()]


def _configs() -> dict[str, dict[str, Any]]:
    """Options of Inductor and of AOT autograd, but for functions: where there are any, no program is kept."""
    return {name: config.save_config_portable(ignore_private_configs=False) for name, config in CONFIGS.items()}  # type: ignore[attr-defined]


def _write(content: dict[str, Any]) -> Path:
    folder = cache_folder() / "jobs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise TraceNotKept(f"{folder} can be written by others")
    data = io.BytesIO()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    PlainPickler(data, protocol=5).dump({**content, "cuda device": device})
    handle, name = tempfile.mkstemp(dir=folder, suffix=".job")
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.getvalue())
    except BaseException:  # as of a full disk
        remove(path)
        raise
    return path
