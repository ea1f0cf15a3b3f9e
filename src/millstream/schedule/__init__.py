"""Turn a graph and its costs into a plan, and tell how much memory the plan takes."""

from millstream.schedule.assignment import (
    Assignment,
    Gaps,
    assign_among,
    assign_chains,
    assign_list,
    assign_slack,
    by_urgency,
)
from millstream.schedule.memory.allocation import place_allocations
from millstream.schedule.memory.lifetimes import Lifetime, derive_lifetimes, peak_bytes
from millstream.schedule.memory.packing import assign_offsets
from millstream.schedule.policies import POLICIES, Policy, plan_graph
from millstream.schedule.ranking import critical_path, critical_path_ns, rank_kernels
from millstream.schedule.scheduling import HAND_STREAMS, MOST_STREAMS, Scheduling, Tune
from millstream.schedule.serial import plan_alike, plan_serial
from millstream.schedule.waits import place_waits

__all__ = [
    "HAND_STREAMS",
    "MOST_STREAMS",
    "POLICIES",
    "Assignment",
    "Gaps",
    "Lifetime",
    "Policy",
    "Scheduling",
    "Tune",
    "assign_among",
    "assign_chains",
    "assign_list",
    "assign_offsets",
    "assign_slack",
    "by_urgency",
    "critical_path",
    "critical_path_ns",
    "derive_lifetimes",
    "peak_bytes",
    "place_allocations",
    "place_waits",
    "plan_alike",
    "plan_graph",
    "plan_serial",
    "rank_kernels",
]
