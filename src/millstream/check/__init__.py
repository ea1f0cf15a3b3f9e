"""Prove that a plan is safe to run, without running it."""

from millstream.check.lifetime_errors import find_lifetime_errors
from millstream.check.overlaps import find_overlaps
from millstream.check.plan_check import check_plan
from millstream.check.races import find_races
from millstream.check.reports import Access, Action, LifetimeError, LifetimeFault, Overlap, Race

__all__ = [
    "Access",
    "Action",
    "LifetimeError",
    "LifetimeFault",
    "Overlap",
    "Race",
    "check_plan",
    "find_lifetime_errors",
    "find_overlaps",
    "find_races",
]
