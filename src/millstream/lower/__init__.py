"""FX graph of torch operators → fused kernels with known reads and writes."""

from millstream.lower.compile import Lowered, Phase, compile_graph, frozen_parameters
from millstream.lower.program import Call, Layout, Program, Value, View

__all__ = ["Call", "Layout", "Lowered", "Phase", "Program", "Value", "View", "compile_graph", "frozen_parameters"]
