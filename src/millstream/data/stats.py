"""Statistics of a feed's measured steps: where the time goes. ``millstream profile`` finds out why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

CAUSES = ("source", "stage", "copy", "compute", "host")

ONE_OFF_NS, ONE_OFF_FACTOR = 50_000_000, 10
"""A step is one-off (it compiles, captures, saves a checkpoint) if it computes this long, and so many times as long as
usual. What it says of the others is nothing, so it is counted apart."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One measured step; all in nanoseconds.

    Attributes:
        index: Number of its batch in its pass.
        wait_ns: How long the device waited for the batch.
        run_ns: How long the user's step took after that.
        copy_ns: How long the copy and a transform took; 0 without one.
        pull_ns: How long the source took.
        stage_ns: How long staging took.
        causes: For each of ``CAUSES`` what it had of the step.
        num_bytes: Staged bytes.
    """

    index: int
    wait_ns: int
    run_ns: int
    copy_ns: int
    pull_ns: int
    stage_ns: int
    causes: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Stats:
    """The division of the loop's time in one pass; see ``Feed.stats``.

    Attributes:
        num_batches: Batches handed out.
        num_measured: Steps that were measured, of long passes the last 1,024; not the first, which waits for warm-up,
            nor one-off ones.
        step_s: Median length of a step.
        shares: For each cause its share of the time: ``source`` and ``stage`` (waiting for the source, for staging),
            ``copy`` (waiting for a copy, not hidden behind computing), ``compute``, ``host`` (the device had run dry).
            They sum to 1; empty before anything was measured.
        copy_s: Median length of a copy; 0 without one.
        hidden: Share of the copies' time that was hidden; ``None`` without a copy.
        source_s: Median time that the source took for a batch, hidden or not.
        stage_s: Median time that staging took, hidden or not.
        one_off_s: Time of steps that took much longer than usual: compilation, as a rule.
        batch_bytes: Mean size of a staged batch.
        num_kept: Pieces of memory that the user has kept beyond the next batch, so that new ones had to be taken.
        has_worker: Whether batches are made in a thread of the feed's.
        in_step: Which generators the source draws from, so that it is not read ahead; empty if it is.
        is_staged: Whether batches go to a device. On the CPU ``stage`` is the time of ``transform=`` and ``cast=``.
    """

    num_batches: int = 0
    num_measured: int = 0
    step_s: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    copy_s: float = 0.0
    hidden: float | None = None
    source_s: float = 0.0
    stage_s: float = 0.0
    one_off_s: float = 0.0
    batch_bytes: float = 0.0
    num_kept: int = 0
    has_worker: bool = True
    in_step: str = ""
    is_staged: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.num_batches} batches, {self.num_measured} steps measured, {_ms(self.step_s)} each (median)"]
        meanings = _MEANINGS if self.is_staged else _MEANINGS | {"stage": "waiting for transform= or cast="}
        lines += [f"  {name:8} {share:7.1%}  {meanings[name]}" for name, share in self.shares.items()]
        if self.one_off_s:
            lines.append(
                f"  {self.one_off_s:.3g} s more in steps that took much longer than usual: compilation, as a rule"
            )
        if self.hidden is not None:
            rate = self.batch_bytes / self.copy_s / 1e9 if self.copy_s else 0.0
            lines.append(f"  copies: {_ms(self.copy_s)} each, {rate:.1f} GB/s, {self.hidden:.0%} of their time hidden")
        if self.num_kept:
            lines.append(f"  {self.num_kept} pieces of memory were kept by the loop and replaced")
        if self.in_step:
            lines.append(f"  the source draws from the generator of {self.in_step}, so that it is not read ahead")
        why = "millstream profile says why, and at which line." if self.shares else "Too few batches to tell more."
        return "\n".join([*lines, why])


_MEANINGS = {
    "source": "waiting for the source",
    "stage": "waiting for staging in pinned memory",
    "copy": "waiting for the copy",
    "compute": "computing, or with work queued",
    "host": "run dry: the host launched too slowly",
}


def summarize(steps: Sequence[StepTimes], **facts: Any) -> Stats:
    """The figures of some steps.

    Args:
        steps: Measured ones of one pass.
        facts: Other fields of ``Stats``.
    """
    # One must wait for the warm-up.
    steps = [step for step in steps if step.index]
    if not steps:
        return Stats(**facts)
    usual_ns = median(step.run_ns for step in steps)
    limit_ns = max(ONE_OFF_NS, ONE_OFF_FACTOR * usual_ns)
    one_off_ns = sum(step.run_ns for step in steps if step.run_ns > limit_ns)
    steps = [step for step in steps if step.run_ns <= limit_ns]
    sums = [sum(each) for each in zip(*(step.causes for step in steps), strict=True)]
    total = sum(sums)
    copies = [step.copy_ns for step in steps if step.copy_ns]
    exposed_ns = sums[CAUSES.index("copy")]
    return Stats(
        num_measured=len(steps),
        step_s=median(step.wait_ns + step.run_ns for step in steps) / 1e9,
        shares={cause: spent / total for cause, spent in zip(CAUSES, sums, strict=True)} if total else {},
        copy_s=median(copies) / 1e9 if copies else 0.0,
        hidden=1 - exposed_ns / sum(copies) if sum(copies) else None,
        source_s=median(step.pull_ns for step in steps) / 1e9,
        stage_s=median(step.stage_ns for step in steps) / 1e9,
        one_off_s=one_off_ns / 1e9,
        batch_bytes=sum(step.num_bytes for step in steps) / len(steps),
        **facts,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
