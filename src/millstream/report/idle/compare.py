"""Reports as data: what a run must not exceed, and what has changed from one run to another."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import ArgumentError
from millstream.insight import Cause
from millstream.report.words import duration, percent, table

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(r"\s*([a-z ]+?)\s*(>=|<=|>|<)\s*([0-9.]+)\s*(%|s|ms|us|µs)?\s*", re.IGNORECASE)
_SECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3}
SLOWER = "slower"


@dataclass(frozen=True)
class Condition:
    """A bound on a figure of a report, as ``idle>20%``, ``data>5%`` or ``step>120ms``; of two, ``slower>5%``, too.

    Attributes:
        text: As it was given.
        name: ``idle``, ``step``, ``slower``, or a cause.
        sign: How it is compared.
        bound: A share from 0 to 1, or nanoseconds of a step.
    """

    text: str
    name: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read one.

        Raises:
            ArgumentError: It is none.
        """
        match = _FORM.fullmatch(text)
        names = ("idle", "step", SLOWER, *(str(cause) for cause in Cause))
        if match is None or match[1].lower() not in names:
            raise ArgumentError(
                f"{text!r} is no condition: write a name, > or <, and a bound, as in 'idle>20%' or 'step>120ms'; "
                f"names are {', '.join(names)}"
            )
        name, sign, number, unit = match[1].lower(), *match.groups()[1:]
        if (name == "step") != (unit in _SECONDS) or unit is None:
            raise ArgumentError(f"{text!r}: a step is bounded in ms ('step>120ms'), all else in % ('idle>20%')")
        try:
            bound = float(number)
        except ValueError:
            raise ArgumentError(f"{text!r}: {number!r} is no number") from None
        return cls(text, name, sign, bound * _SECONDS.get(unit, 0.01))

    def holds(self, report: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> bool:
        """Return whether a report's figure is on that side of the bound.

        ``slower`` is by as much as a step took before.
        """
        if self.name != SLOWER:
            return bool(_COMPARE[self.sign](figure(report, self.name), self.bound))
        was, now = figure(before or report, "step"), figure(report, "step")
        return bool(was and _COMPARE[self.sign]((now - was) / was, self.bound))


def figure(report: Mapping[str, Any], name: str) -> float:
    """A figure of a report: length of a step in nanoseconds, else a share of its steps."""
    if name == "step":
        return float(report.get("usual_step_ns") or report["step_ns"])
    if name == "idle":
        return float(report["idle"])
    window = report["step_ns"] * report["num_steps"]
    spent = report["idle_ns_by_cause"].get(name, 0) + report["exposed_ns"].get(name, 0)
    return spent / window if window else 0.0


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say in a table what has changed from one report to another."""
    names = list(before["idle_ns_by_cause"] | after["idle_ns_by_cause"])
    pairs = [(figure(before, "step"), figure(after, "step"))]
    rows = [("step", *(duration(each) for each in pairs[0]), _change(*pairs[0]))]
    for name in ("idle", *names):
        was, now = figure(before, name), figure(after, name)
        rows.append((name, percent(was, 1), percent(now, 1), f"{(now - was) * 100:+.1f} points"))
    was, now = pairs[0]
    gain = f"{was / now:.3g} times as fast" if now else "no step to compare"
    lines = [
        f"{before['script']} → {after['script']}: {gain}",
        *table(("", "before", "after", "change"), rows, {1, 2, 3}),
    ]
    for name, report in (("before", before), ("after", after)):
        if report.get("why_unreliable"):
            lines.append(f"note: {name} is unreliable: {report['why_unreliable']}")
    return "\n".join(lines)


def _change(was: float, now: float) -> str:
    return f"{(now - was) / was:+.0%}".replace("%", " %") if was else "–"
