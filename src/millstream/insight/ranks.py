"""Several processes that train together: who waits for whom, told from the reports of each.

The n-th collective of a step is the same on all ranks. It cannot begin before the last rank has come: until then the
others *wait* for a *straggler*; from then on it *transfers*. One rank alone cannot tell the two apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from millstream.errors import ArgumentError
from millstream.insight.causes import REMEDY_FREE, Cause
from millstream.insight.findings import HIGH, MODERATE, Severity

_OTHER_CLOCK_NS = 1_000_000  # collectives end together: ranks whose ends differ by more have another clock
_FAIR = 0.5  # of all waiting: a rank that causes so much of it is the straggler


@dataclass(frozen=True)
class RankShare:
    """One rank's part.

    Attributes:
        rank: Its number.
        step_ns: Mean length of its steps.
        waited_ns: Time a step in which it waited for others in collectives.
        caused_ns: Time a step that the others waited for it, on average.
        cause: What its device, apart from collectives, idled for most; ``None`` where it did not.
        site: File and line of that.
        cause_ns: How long, a step.
    """

    rank: int
    step_ns: float
    waited_ns: float
    caused_ns: float
    cause: str | None
    site: tuple[str, int] | None
    cause_ns: float


@dataclass(frozen=True)
class MergedFindings:
    """The joint findings of the ranks.

    Attributes:
        severity: Of the diagnosis; ``UNRELIABLE`` where the ranks have no collective in common.
        straggler: The rank that the others wait for; ``None`` where there is none.
        ranks: In order.
        num_collectives: Seen by all ranks.
        transfer_ns: Time a step that collectives took once all had come.
        waited_ns: Time a step that a rank waited for others, on average.
        step_ns: Mean length of a step.
    """

    severity: Severity
    straggler: RankShare | None
    ranks: tuple[RankShare, ...]
    num_collectives: int
    transfer_ns: float
    waited_ns: float
    step_ns: float


def merge(reports: Sequence[Mapping[str, Any]]) -> MergedFindings:
    """Put the reports of all ranks together.

    Args:
        reports: As ``Findings.to_dict`` gives them, in any order.

    Raises:
        ArgumentError: There are fewer than two, or two of one rank.
    """
    reports = sorted(reports, key=lambda report: report["rank"])
    numbers = [report["rank"] for report in reports]
    if len(set(numbers)) < max(len(reports), 2):
        raise ArgumentError(f"there must be reports of two ranks or more, each once; these are of {numbers}")
    times = [{(step, number): (start, end) for step, number, start, end in r["collectives"]} for r in reports]
    common = sorted(set(times[0]).intersection(*times[1:]))
    times = [_on_clock(each, times[0], common) for each in times]
    waited, caused, transfer = [0.0] * len(reports), [0.0] * len(reports), 0.0
    for key in common:
        starts = [each[key][0] for each in times]
        latest = max(starts)
        for position, start in enumerate(starts):
            waited[position] += latest - start
        others = sorted(starts)[:-1]
        caused[starts.index(latest)] += latest - sum(others) / len(others)
        transfer += max(min(each[key][1] for each in times) - latest, 0)
    num_steps = max(len({step for step, _ in common}), 1)
    ranks = tuple(
        _share_of(report, waited[position] / num_steps, caused[position] / num_steps)
        for position, report in enumerate(reports)
    )
    step_ns = sum(share.step_ns for share in ranks) / len(ranks)
    severity, straggler = _judge(ranks, transfer / num_steps, step_ns)
    if not common:
        severity = Severity.UNRELIABLE
    mean_ns = sum(waited) / len(waited) / num_steps
    return MergedFindings(severity, straggler, ranks, len(common), transfer / num_steps, mean_ns, step_ns)


def _judge(ranks: Sequence[RankShare], transfer_ns: float, step_ns: float) -> tuple[Severity, RankShare | None]:
    worst = max(ranks, key=lambda share: share.caused_ns)
    total = sum(share.caused_ns for share in ranks)
    is_straggler = worst.caused_ns >= _FAIR * total and worst.caused_ns >= MODERATE * step_ns
    lost = max(total, transfer_ns) / max(step_ns, 1)
    severity = Severity.HIGH if lost >= HIGH else Severity.MODERATE if lost >= MODERATE else Severity.HEALTHY
    return severity, worst if is_straggler and total >= transfer_ns else None


def _on_clock(
    times: Mapping[tuple[int, int], tuple[int, int]],
    reference: Mapping[tuple[int, int], tuple[int, int]],
    common: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], tuple[int, int]]:
    """Times on the clock of another rank, which may be another host's."""
    shift = round(median(reference[key][1] - times[key][1] for key in common)) if common else 0
    if abs(shift) < _OTHER_CLOCK_NS:
        shift = 0
    return {key: (start + shift, end + shift) for key, (start, end) in times.items()}


def _share_of(report: Mapping[str, Any], waited_ns: float, caused_ns: float) -> RankShare:
    spent: dict[str, int] = defaultdict(int)
    lines: dict[str, dict[tuple[str, int], int]] = defaultdict(lambda: defaultdict(int))
    hidden = {str(cause) for cause in (*REMEDY_FREE, Cause.COMMUNICATION)}
    for row in report["rows"]:
        if row["cause"] in hidden or row["is_rare"]:
            continue
        spent[row["cause"]] += row["idle_ns"]
        if row["site"] is not None:
            lines[row["cause"]][row["site"]["file"], row["site"]["line"]] += row["idle_ns"]
    cause = max(spent, key=spent.__getitem__, default=None)
    steps = max(report["num_steps"], 1)
    site = max(lines[cause], key=lines[cause].__getitem__, default=None) if cause is not None else None
    took = spent[cause] / steps if cause is not None else 0.0
    return RankShare(report["rank"], report["step_ns"], waited_ns, caused_ns, cause, site, took)
