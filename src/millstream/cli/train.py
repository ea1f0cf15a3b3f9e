"""The command ``train``: the same steps eager and as one graph, compared; then on with the graph.

**Contract**
- Both runs start from the same weights, optimizer state, carried state and random numbers, and see the same batches.
- Both speeds are of the same steps, after the same warm-up, which for the graph holds capture and compilation.
- Ctrl-C, once both runs have been compared, ends training behind the present step, which is saved like the last one.
- The checkpoint holds all that the next run needs to give the bits that this one would have given.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import millstream as ms
from millstream.cli.checkpoint import check_writable, load_checkpoint, restore, save_checkpoint
from millstream.cli.command import EXIT_INTERRUPTED
from millstream.cli.job import Carry, Job

WARM_UP_STEPS = 3  # eager, which makes the optimizer's state; captured and compiled; recorded as a CUDA graph
TOLERANCE = 1e-3  # relative, of a loss: float32 rounding that the steps amplify stays far below, a wrong gradient above
DEFAULT_SECONDS = 150.0  # a run that the user gives no length ends then, compilation included, whatever the machine
LEAST_SECONDS = 10.0  # but trains for so long, also where compilation took longer than all that
REFRESH_SECONDS = 0.5  # a loss is read from the device, which waits for it, no more often than this

EXIT_OK = 0
EXIT_DISAGREE = 1


@dataclass
class Run:
    """A job on its way.

    Attributes:
        job: What is trained.
        step: How: the job's own step, or the captured one.
        done: Steps since the weights were fresh.
        carry: What the last step handed on.
    """

    job: Job
    step: Callable[[Tensor, Tensor, Carry], tuple[Tensor, Carry]]
    done: int
    carry: Carry

    def losses(self) -> Generator[Tensor]:
        """Take one step after the other, without end; yield each loss, on the device."""
        with ms.feed(self.job.batches(self.done), self.job.device) as batches:
            for inputs, targets in batches:
                loss, self.carry = self.step(inputs, targets, self.carry)
                self.done += 1
                yield loss


@dataclass(frozen=True)
class Stretch:
    """What some steps gave.

    Attributes:
        losses: One per step.
        warm_up_seconds: Time of the first ``WARM_UP_STEPS``.
        speed: Units per second of the others; ``None`` when there are none.
    """

    losses: list[float]
    warm_up_seconds: float
    speed: float | None


# TF32's three digits are too few to tell whether losses agree; a run that resumes exactly needs sums in one order.
@torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
def train(
    make_job: Callable[[], Job],
    *,
    steps: int | None,
    seconds: float | None,
    compare: int,
    resume: Path | None,
    checkpoint: Path,
) -> int:
    """Train a job and say what happened.

    Args:
        make_job: Makes the job, fresh and the same each time.
        steps: Length of the run.
        seconds: Time after which the run ends, counted from the first step behind the compared ones. With neither, the
            job's own number of steps holds, and ``DEFAULT_SECONDS`` counted from the beginning.
        compare: Steps to run eagerly too.
        resume: Checkpoint to start from.
        checkpoint: File to save to.

    Returns:
        The exit code.

    Raises:
        ArgumentError: A file cannot be read or written, or the checkpoint is of another job.
    """
    began = time.perf_counter()
    check_writable(checkpoint)
    console = Console(highlight=False, soft_wrap=True)
    job = make_job()
    console.print(f"[bold]{job.name}[/] on {job.device}: {job.title}")
    start = load_checkpoint(resume, job) if resume else None
    has_length = steps is not None or seconds is not None
    if not has_length:
        steps = job.steps
    compare = compare if steps is None else min(compare, steps)

    def begin(captured: bool) -> Run:
        job = make_job()
        done, carry = restore(job, start) if start else (0, job.carry)
        return Run(job, ms.step(job.step) if captured else job.step, done, carry)

    eager = _run_eager(console, begin(captured=False), compare) if compare else None
    run = begin(captured=True)
    with closing(run.losses()) as losses:
        if eager and not _run_compared(console, run, losses, compare, eager):
            return EXIT_DISAGREE
        if not has_length:
            seconds = max(DEFAULT_SECONDS - (time.perf_counter() - began), LEAST_SECONDS)
        with stop_behind_step() as stops:
            _run_on(console, run, losses, None if steps is None else steps - compare, seconds, stops)
    save_checkpoint(checkpoint, run.job, run.done, run.carry)
    if stops():
        console.print(
            f"interrupted; saved {escape(str(checkpoint))} after step {run.done}: --resume goes on from there"
        )
        return EXIT_INTERRUPTED
    console.print(f"saved {escape(str(checkpoint))} after step {run.done}: --resume goes on from there")
    console.print(run.job.show(), markup=False)
    return EXIT_OK


def run_stretch(losses: Iterator[Tensor], count: int, units_per_step: int) -> Stretch:
    """Take ``count`` steps without waiting for the device, but for once behind the warm-up and once at the end."""
    begin = time.perf_counter()
    values = _read(islice(losses, min(WARM_UP_STEPS, count)))
    ready = time.perf_counter()
    rest = count - len(values)
    values += _read(islice(losses, rest))
    seconds = time.perf_counter() - ready
    return Stretch(values, ready - begin, rest * units_per_step / seconds if rest else None)


def find_largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two equally long lists of losses; NaN when one holds a NaN."""
    differences = [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(math.isnan(difference) for difference in differences) else max(differences)


def _run_eager(console: Console, run: Run, count: int) -> Stretch:
    with console.status(f"{count} steps eager"), closing(run.losses()) as losses:
        stretch = run_stretch(losses, count, run.job.units_per_step)
    console.print(f"eager      {_describe_speed(stretch, run.job.unit)}")
    return stretch


def _run_compared(console: Console, run: Run, losses: Iterator[Tensor], count: int, eager: Stretch) -> bool:
    with console.status(f"{count} steps as one graph; the first ones capture and compile"):
        stretch = run_stretch(losses, count, run.job.units_per_step)
    gain = f", {stretch.speed / eager.speed:.2f} times eager" if stretch.speed and eager.speed else ""
    console.print(
        f"one graph  {_describe_speed(stretch, run.job.unit)}{gain} (ready after {stretch.warm_up_seconds:.1f} s)"
    )
    difference = find_largest_difference(stretch.losses, eager.losses)
    agree = difference <= TOLERANCE
    console.print(
        f"losses of {count} steps {'agree' if agree else '[bold red]disagree[/]'}: "
        f"largest relative difference {difference:.1e}, allowed {TOLERANCE:.0e}"
    )
    return agree


@contextmanager
def stop_behind_step() -> Iterator[Callable[[], bool]]:
    """Have the first Ctrl-C, or SIGTERM, only be noted, and the next one interrupt as ever.

    Yields:
        Whether there was one.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # who alone may handle signals
        yield lambda: False
        return

    def note(number: int, _: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_on(
    console: Console,
    run: Run,
    losses: Iterator[Tensor],
    count: int | None,
    seconds: float | None,
    stops: Callable[[], bool],
) -> None:
    if count == 0:
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} {task.fields[unit]}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=count, loss=math.nan, speed=0.0, unit=run.job.unit)
        begin = shown = time.perf_counter()
        for taken, loss in enumerate(islice(losses, count), start=1):
            now = time.perf_counter()
            over = taken == count or stops() or (seconds is not None and now - begin >= seconds)
            if over or now - shown >= REFRESH_SECONDS:
                shown = now
                value = loss.item()
                speed = taken * run.job.units_per_step / (time.perf_counter() - begin)
                progress.update(task, completed=taken, loss=value, speed=speed)
            if over:
                progress.update(task, total=taken)
                return


def _describe_speed(stretch: Stretch, unit: str) -> str:
    return "too few steps to time" if stretch.speed is None else f"{stretch.speed:>10,.0f} {unit}/s"


def _read(losses: Iterator[Tensor]) -> list[float]:
    """Return the values of losses, read from the device in one go."""
    values = list(losses)
    return torch.stack(values).tolist() if values else []
