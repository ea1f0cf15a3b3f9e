"""The core's data: kernel graphs and plans, what follows from them, and how they read."""

from millstream.graph.choice import CHOSEN, Candidate
from millstream.graph.dependencies import (
    Dependency,
    DependencyKind,
    derive_dependencies,
    step_storages,
)
from millstream.graph.kernel_graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.graph.layout import MemoryLayout, alignment_of
from millstream.graph.order import HappensBefore, Moment, StreamClocks
from millstream.graph.plan import Allocate, Free, Launch, Plan, Record, Spread, Step, Wait
from millstream.graph.ranges import OwnedRanges
from millstream.graph.text import ParseError, format_graph, format_plan, format_step, parse_graph, parse_plan
from millstream.graph.timeline import Span, Timeline
from millstream.graph.validate import CALLER_ROLES, PLANNED_ROLES, validate_graph, validate_plan

__all__ = [
    "CALLER_ROLES",
    "CHOSEN",
    "PLANNED_ROLES",
    "Allocate",
    "Buffer",
    "Candidate",
    "Dependency",
    "DependencyKind",
    "Free",
    "HappensBefore",
    "Kernel",
    "KernelGraph",
    "KernelKind",
    "Launch",
    "MemoryLayout",
    "Moment",
    "OwnedRanges",
    "ParseError",
    "Plan",
    "Record",
    "Role",
    "Span",
    "Spread",
    "Step",
    "StreamClocks",
    "Timeline",
    "Wait",
    "alignment_of",
    "derive_dependencies",
    "format_graph",
    "format_plan",
    "format_step",
    "parse_graph",
    "parse_plan",
    "step_storages",
    "validate_graph",
    "validate_plan",
]
