"""The command ``train``: the same steps eager and as one graph, compared; then on with the graph.

**Contract**
- Both runs start from the same weights, optimizer state, carried state and random numbers, and see the same batches.
- Both speeds are of the same steps, taken in turn, a few of one run and the same of the other, after the same warm-up,
  which for the graph holds capture and compilation. What else runs on the machine slows both.
- Where the times differ too much from round to round, no gain is claimed: the range is told instead.
- Ctrl-C, once both runs have been compared, ends training after the present step, which is saved like the last one.
- The checkpoint holds all that the next run needs to give the bits that this one would have given.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import millstream as ms
from millstream.cli.exits import EXIT_DISAGREE, EXIT_INTERRUPTED, EXIT_OK
from millstream.cli.training.checkpoint import check_writable, load_checkpoint, restore, save_checkpoint
from millstream.cli.training.devices import STEPS_BETWEEN_ASKS, Team
from millstream.cli.training.job import Carry, Job

WARM_UP_STEPS = 3  # eager, which makes the optimizer's state; captured and compiled; recorded as a CUDA graph
TOLERANCE = 1e-3  # relative, of a loss: float32 rounding that the steps amplify stays far below, a wrong gradient above
DEFAULT_SECONDS = 150.0  # a run that the user gives no length ends then, compilation included, whatever the machine
LEAST_SECONDS = 10.0  # but trains for so long, also where compilation took longer than all that
NUM_ROUNDS = 6  # of the comparison, or more: enough for a median and a spread
WIDEST_SPREAD = 1.5  # of the gains of single rounds, 80th over 20th percentile; on a quiet machine it is below 1.2
REFRESH_SECONDS = 0.5  # a loss is read from the device, which waits for it, no more often than this

STDERR = 2


@dataclass
class Run:
    """A job on its way.

    Attributes:
        job: What is trained.
        step: How: the job's own step, or the captured one.
        done: Steps since the weights were fresh.
        carry: What the last step handed on.
        randomness: Random numbers as the last step left them, while another run has its turn.
    """

    job: Job
    step: Callable[[Tensor, Tensor, Carry], tuple[Tensor, Carry]]
    done: int
    carry: Carry
    randomness: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.randomness = _random_state(self.job.device)

    def losses(self) -> Generator[Tensor]:
        """Take one step after the other, without end; yield each loss, on the device."""
        with ms.feed(self.job.batches(self.done), self.job.device) as batches:
            for inputs, targets in batches:
                loss, self.carry = self.step(inputs, targets, self.carry)
                self.done += 1
                yield loss

    def restore_randomness(self) -> None:
        """Set PyTorch's generators to where the last turn of this run left them."""
        torch.set_rng_state(self.randomness[0])
        if self.job.device.type == "cuda":
            torch.cuda.set_rng_state(self.randomness[1], self.job.device)


@dataclass(frozen=True)
class Gain:
    """How many times as fast as eager one graph was.

    Attributes:
        median: Of the rounds.
        low: 20th percentile.
        high: 80th percentile.
    """

    median: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether the rounds agree well enough for the median to mean something."""
        return self.high <= WIDEST_SPREAD * self.low


@dataclass
class Turns:
    """What the turns of one run took and gave.

    Attributes:
        losses: One a step.
        warm_up_seconds: Time of the first ``WARM_UP_STEPS``.
        seconds: Of a step, one entry a round.
    """

    losses: list[float] = field(default_factory=list)
    warm_up_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)


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
    team: Team | None = None,
) -> int:
    """Train a job and say what happened.

    Args:
        make_job: Makes the job, fresh and the same each time.
        steps: Length of the run.
        seconds: Time after which the run ends, counted from the first step after the compared ones. With neither, the
            job's own number of steps holds, and ``DEFAULT_SECONDS`` counted from the beginning.
        compare: Steps to run eagerly too.
        resume: Checkpoint to start from.
        checkpoint: File to save to.
        team: The processes that share each batch; the first of them speaks and saves, and none compares with eager.

    Returns:
        The exit code.

    Raises:
        ArgumentError: A file cannot be read or written, or the checkpoint is of another job.
    """
    began = time.perf_counter()
    is_first = team is None or team.rank == 0
    if is_first:
        check_writable(checkpoint)
    console = Console(highlight=False, soft_wrap=True, quiet=not is_first)
    job = make_job()
    console.print(f"[bold]{job.name}[/] on {job.device if team is None else f'{team.size} devices'}: {job.title}")
    start = load_checkpoint(resume, job) if resume else None
    has_length = steps is not None or seconds is not None
    if not has_length:
        steps = job.steps
    compare = 0 if team is not None else compare if steps is None else min(compare, steps)

    def begin(captured: bool) -> Run:
        job = make_job()
        done, carry = restore(job, start) if start else (0, job.carry)
        if team is not None:
            job = team.share(job, carry)
            return Run(job, ms.step(job.step, data_parallel=True), done, job.carry)
        return Run(job, ms.step(job.step) if captured else job.step, done, carry)

    run = begin(captured=True)
    with closing(run.losses()) as losses:
        if compare and not _compare(console, begin(captured=False), run, losses, compare):
            return EXIT_DISAGREE
        run.restore_randomness()
        if not has_length:
            seconds = max(DEFAULT_SECONDS - (time.perf_counter() - began), LEAST_SECONDS)
        with stop_after_step() as stops:
            _run_on(console, run, losses, None if steps is None else steps - compare, seconds, stops, team)
    carry = run.carry if team is None else team.join_rows(run.carry)
    if not is_first:
        return EXIT_INTERRUPTED if stops() else EXIT_OK
    save_checkpoint(checkpoint, run.job, run.done, carry)
    if stops():
        console.print(
            f"interrupted; saved {escape(str(checkpoint))} after step {run.done}: --resume continues from there"
        )
        return EXIT_INTERRUPTED
    console.print(f"saved {escape(str(checkpoint))} after step {run.done}: --resume continues from there")
    console.print(run.job.show(), markup=False)
    return EXIT_OK


def take_turns(runs: list[tuple[Run, Iterator[Tensor]]], count: int) -> list[Turns]:
    """Take the first ``count`` steps of several runs in turn: the warm-up of each, then rounds of a few steps of each.

    The device is waited for at the end of a turn only. Each run sees the random numbers that it would see alone.

    Args:
        runs: The runs, and the losses each yields.
        count: Steps of each.
    """
    turns = [Turns() for _ in runs]

    def take(index: int, steps: int) -> float:
        run, losses = runs[index]
        run.restore_randomness()
        begin = time.perf_counter()
        turns[index].losses += _read(islice(losses, steps))
        seconds = time.perf_counter() - begin
        run.randomness = _random_state(run.job.device)
        return seconds

    for index, turn in enumerate(turns):
        turn.warm_up_seconds = take(index, min(WARM_UP_STEPS, count))
    rest = count - WARM_UP_STEPS
    steps = max(rest // NUM_ROUNDS, 1)
    while rest > 0:
        steps = min(steps, rest)
        for index, turn in enumerate(turns):
            turn.seconds.append(take(index, steps) / steps)
        rest -= steps
    return turns


def find_gain(eager_seconds: list[float], our_seconds: list[float]) -> Gain:
    """Compare two runs round by round: what slowed one for a while is likely to have slowed the other's same round."""
    gains = sorted(eager / ours for eager, ours in zip(eager_seconds, our_seconds, strict=True))
    last = len(gains) - 1
    return Gain(statistics.median(gains), gains[math.floor(0.2 * last)], gains[math.ceil(0.8 * last)])


def find_largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two equally long lists of losses; NaN when one holds a NaN."""
    differences = [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(math.isnan(difference) for difference in differences) else max(differences)


def _compare(console: Console, eager: Run, run: Run, losses: Iterator[Tensor], count: int) -> bool:
    """Take the first steps eagerly and as one graph; tell both speeds, and return whether the losses agree."""
    told = f"{count} steps, eager and as one graph in turn; the first ones capture and compile"
    with console.status(told), closing(eager.losses()) as eager_losses:
        theirs, ours = take_turns([(eager, eager_losses), (run, losses)], count)
    job = run.job
    console.print(f"eager      {_describe_speed(theirs, job)}")
    gain = f", {_describe_gain(find_gain(theirs.seconds, ours.seconds))}" if ours.seconds else ""
    console.print(f"one graph  {_describe_speed(ours, job)}{gain} (ready after {ours.warm_up_seconds:.1f} s)")
    difference = find_largest_difference(ours.losses, theirs.losses)
    agree = difference <= TOLERANCE
    console.print(
        f"losses of {count} steps {'agree' if agree else '[bold red]disagree[/]'}: "
        f"largest relative difference {difference:.1e}, allowed {TOLERANCE:.0e}"
    )
    return agree


@contextmanager
def stop_after_step() -> Iterator[Callable[[], bool]]:
    """Have the first Ctrl-C, or SIGTERM, only be noted and reported, and the next one interrupt as usual.

    Yields:
        Whether there was one.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield lambda: False
        return

    def note(number: int, _: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        os.write(STDERR, b"\nstopping after this step; again to stop now\n")  # a handler may not enter Python's buffers

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
    team: Team | None = None,
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
            over = stops() or (seconds is not None and now - begin >= seconds)
            if team is not None:  # all stop after the same step
                over = taken % STEPS_BETWEEN_ASKS == 0 and team.any(over, run.job.device)
            over = over or taken == count
            if over or now - shown >= REFRESH_SECONDS:
                shown = now
                value = loss.item()
                speed = taken * run.job.units_per_step / (time.perf_counter() - begin)
                progress.update(task, completed=taken, loss=value, speed=speed)
            if over:
                progress.update(task, total=taken)
                return


def _describe_speed(turns: Turns, job: Job) -> str:
    if not turns.seconds:
        return "too few steps to time"
    return f"{job.units_per_step / statistics.median(turns.seconds):>10,.0f} {job.unit}/s"


def _describe_gain(gain: Gain) -> str:
    if gain.is_certain:
        return f"{gain.median:.2f} times eager"
    load = f"; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
    return f"{gain.low:.2f} to {gain.high:.2f} times eager: this machine is too busy to tell{load}"


def _random_state(device: torch.device) -> list[Tensor]:
    """The state of PyTorch's generators that a step on this device draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _read(losses: Iterator[Tensor]) -> list[float]:
    """Return the values of losses, read from the device in one go."""
    values = list(losses)
    return torch.stack(values).tolist() if values else []
