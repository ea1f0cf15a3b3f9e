"""Work of the device besides training: an evaluation, samples that are drawn, whatever few steps have."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.insight.causes import Cause
from millstream.insight.gaps import Slice
from millstream.insight.intervals import intersect, total
from millstream.insight.records import ProfiledStep, Recording, Site

LEAST = 0.10
"""Of the steps' time: what takes less is not told."""
FEW = 1 / 4
"""Of the steps: what more of them have belongs to training."""
_BACKWARD = "_engine_run_backward"  # of torch.autograd.graph, which backward() and grad() call


@dataclass(frozen=True)
class Aside:
    """A line that takes long in few steps, computes, and calls no backward pass.

    Attributes:
        site: The user's line, the outermost there is.
        num_steps: Steps that have it.
        share: What it takes of the time of all steps.
    """

    site: Site
    num_steps: int
    share: float


def find_aside(recording: Recording, steps: Sequence[ProfiledStep], slices: Sequence[Slice]) -> Aside | None:
    """Find what takes most of the time beside training, if that is much.

    Args:
        recording: Its samples tell.
        steps: Those to judge.
        slices: When the device idled.
    """
    start, end = steps[0].start_ns, steps[-1].end_ns
    starts = [step.start_ns for step in steps]
    seen: dict[Site, set[int]] = defaultdict(set)
    times: dict[Site, list[tuple[int, int]]] = defaultdict(list)
    training: set[Site] = set()
    depth: dict[Site, int] = {}
    for sample in recording.samples:
        if sample.thread != recording.thread or not start <= sample.start_ns < end:
            continue
        own = [site for site in sample.stack if not recording.is_library(site.file)]
        if any(site.function == _BACKWARD for site in sample.stack):
            training.update(own)
        for height, site in enumerate(reversed(own)):  # the outermost first
            depth.setdefault(site, height)
            seen[site].add(bisect.bisect_right(starts, sample.start_ns) - 1)
            times[site].append((sample.start_ns, min(sample.end_ns, end)))
    # A thread that is ready for a processor has something to compute.
    idle = [(each.start_ns, each.end_ns) for each in slices if each.cause is not Cause.DESCHEDULED]
    found = []
    for site in times.keys() - training:
        spent = total(times[site])
        if spent < LEAST * (end - start) or len(seen[site]) > FEW * len(steps):
            continue
        if total(intersect(times[site], idle)) <= spent / 2:
            found.append((spent, -depth[site], site))
    if not found:
        return None
    spent, _, site = max(found, key=lambda each: each[:2])
    return Aside(site, len(seen[site]), spent / (end - start))
