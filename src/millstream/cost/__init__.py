"""What kernels cost: calculated by roofline, or measured and kept in a table."""

from millstream.cost.model import CostModel, Costs, KernelCost
from millstream.cost.roofline import CPU, H200, DeviceLimits, Roofline
from millstream.cost.table import CostTable, MeasuredCosts, format_table, kernel_key, parse_table

__all__ = [
    "CPU",
    "H200",
    "CostModel",
    "CostTable",
    "Costs",
    "DeviceLimits",
    "KernelCost",
    "MeasuredCosts",
    "Roofline",
    "format_table",
    "kernel_key",
    "parse_table",
]
