"""What really happens while a script runs: hooks and a sampler that write down, and decide nothing."""

from millstream.trace.session import Session, Waiter
from millstream.trace.syncs import SyncTrace

__all__ = ["Session", "SyncTrace", "Waiter"]
