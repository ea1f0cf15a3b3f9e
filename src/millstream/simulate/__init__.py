"""Plans run without a device: on a virtual clock, or on made-up values in any order that is allowed."""

from millstream.simulate.clock import simulate
from millstream.simulate.execute import execute_graph, execute_plan

__all__ = ["execute_graph", "execute_plan", "simulate"]
