"""Kernels are put on the devices of one process, with the copies that this takes.

A device is one more fact of a kernel and of a buffer, and a copy is a kernel of the graph: what schedules, simulates,
checks and runs plans takes a placed graph like any other.
"""

from millstream.placement.crossing import Placement, insert_copies
from millstream.placement.machine import Constraints, Machine, Units, find_units
from millstream.placement.planning import PlacedPlan
from millstream.placement.proof import check_placement, check_streams
from millstream.placement.search import on_one, place

__all__ = [
    "Constraints",
    "Machine",
    "PlacedPlan",
    "Placement",
    "Units",
    "check_placement",
    "check_streams",
    "find_units",
    "insert_copies",
    "on_one",
    "place",
]
