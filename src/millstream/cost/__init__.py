"""Costs of kernels: calculated by roofline, or measured and kept in a table."""

from millstream.cost.cost_model import CostModel, Costs, KernelCost
from millstream.cost.measured_costs import CostTable, MeasuredCosts, format_table, kernel_key, parse_table
from millstream.cost.network import (
    GLOO,
    NVLINK,
    Link,
    Network,
    Rate,
    TimedReduction,
    fit_link,
    parse_link,
    parse_network,
)
from millstream.cost.roofline import CPU, H200, DeviceLimits, Roofline

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
    "TimedReduction",
    "fit_link",
    "format_table",
    "kernel_key",
    "parse_link",
    "parse_network",
    "parse_table",
]
