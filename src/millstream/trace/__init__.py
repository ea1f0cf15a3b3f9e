"""What really happens while a script runs: hooks and a sampler that write down, and decide nothing."""

from millstream.trace.profiled_run import ProfiledRun, Waiter
from millstream.trace.sync_finder import SyncTrace

__all__ = ["ProfiledRun", "SyncTrace", "Waiter"]
