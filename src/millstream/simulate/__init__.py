"""Plans run without a device: on a virtual clock."""

from millstream.simulate.clock import simulate
from millstream.simulate.communication import (
    CollectiveTransfer,
    bucket_bytes,
    find_transfers,
    find_updates,
    leave_out,
    operation_of,
    plan_beside,
    with_collectives,
)
from millstream.simulate.scaling import ASSUMPTIONS, Prediction, costs_on, predict

__all__ = [
    "ASSUMPTIONS",
    "CollectiveTransfer",
    "Prediction",
    "bucket_bytes",
    "costs_on",
    "find_transfers",
    "find_updates",
    "leave_out",
    "operation_of",
    "plan_beside",
    "predict",
    "simulate",
    "with_collectives",
]
