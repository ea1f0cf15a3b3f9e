"""From a graph to a plan, and how much memory the plan takes."""

from millstream.schedule.lifetimes import Lifetime, derive_lifetimes, peak_bytes
from millstream.schedule.memory import assign_offsets
from millstream.schedule.serial import plan_serial

__all__ = ["Lifetime", "assign_offsets", "derive_lifetimes", "peak_bytes", "plan_serial"]
