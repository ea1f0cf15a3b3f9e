"""Lines of a window whose times are stretched, for one whose times are right: joined by the calls' order in a step."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from millstream.insight.profiler.kineto import DeviceTrace
from millstream.insight.records import HostSpan, LaunchCall, ProfiledStep

LEAST_SHARE = 0.8
"""Of the calls: where fewer of them have a counterpart, the two windows did not do the same."""

Key = tuple[str, str, int]
"""Name of a call, name of what it launched, and how many such calls were before it in its step."""


@dataclass(frozen=True)
class Lined:
    """A window's calls with the lines of another window.

    Attributes:
        launches: Those of the first window.
        spans: Those of the first window.
        share: What part of its calls has a counterpart.
    """

    launches: tuple[LaunchCall, ...]
    spans: tuple[HostSpan, ...]
    share: float


def lines_from(
    trace: DeviceTrace, steps: Sequence[ProfiledStep], other: DeviceTrace, other_steps: Sequence[ProfiledStep]
) -> Lined:
    """Give each driver call in a trace's steps the stack of the same call in another trace's steps.

    The same is the n-th call of its name in a step that launches a kernel of the same name. Where fewer than 80 % of
    the calls are found there, the windows did different things, and nothing is changed.

    Args:
        trace: Has the times.
        steps: Its steps, in order.
        other: Has the stacks.
        other_steps: Its steps, in order.
    """
    known: dict[Key, LaunchCall | HostSpan] = {}
    for key, call in _keyed(other, other_steps):
        known.setdefault(key, call)
    twins = [(call, known.get(key)) for key, call in _keyed(trace, steps)]
    found = {id(call): twin for call, twin in twins if twin is not None}
    share = len(found) / len(twins) if twins else 0.0
    if share < LEAST_SHARE:
        return Lined(trace.launches, trace.spans, share)

    def lined_launch(each: LaunchCall) -> LaunchCall:
        twin = found.get(id(each))
        return replace(each, stack=twin.stack, module=twin.module) if isinstance(twin, LaunchCall) else each

    def lined_span(each: HostSpan) -> HostSpan:
        twin = found.get(id(each))
        return replace(each, stack=twin.stack) if isinstance(twin, HostSpan) else each

    return Lined(tuple(map(lined_launch, trace.launches)), tuple(map(lined_span, trace.spans)), share)


def _keyed(trace: DeviceTrace, steps: Sequence[ProfiledStep]) -> Iterator[tuple[Key, LaunchCall | HostSpan]]:
    """The calls that begin in the steps, in order, with what tells those of one step apart."""
    launched = {each.launch: each.name for each in reversed(trace.activities) if each.launch is not None}
    starts = [step.start_ns for step in steps]
    calls: list[LaunchCall | HostSpan] = sorted([*trace.launches, *trace.spans], key=lambda each: each.start_ns)
    counts: Counter[tuple[int, str, str]] = Counter()
    for call in calls:
        number = bisect.bisect_right(starts, call.start_ns) - 1
        if number < 0 or call.start_ns >= steps[number].end_ns:
            continue
        name = call.detail if isinstance(call, HostSpan) else call.name
        kernel = launched.get(call.number, "") if isinstance(call, LaunchCall) else ""
        yield (name, kernel, counts[number, name, kernel]), call
        counts[number, name, kernel] += 1
