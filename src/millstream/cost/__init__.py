"""What kernels cost: calculated by roofline, or measured and kept in a table."""

from millstream.cost.model import CostModel, Costs, KernelCost
from millstream.cost.network import GLOO, NVLINK, Link, Network, Rate, Timed, fit_link, parse_link, parse_network
from millstream.cost.roofline import CPU, H200, DeviceLimits, Roofline
from millstream.cost.table import CostTable, MeasuredCosts, format_table, kernel_key, parse_table

__all__ = [
    "CPU",
    "GLOO",
    "H200",
    "NVLINK",
    "CostModel",
    "CostTable",
    "Costs",
    "DeviceLimits",
    "KernelCost",
    "Link",
    "MeasuredCosts",
    "Network",
    "Rate",
    "Roofline",
    "Timed",
    "fit_link",
    "format_table",
    "kernel_key",
    "parse_link",
    "parse_network",
    "parse_table",
]
