"""Write down what happens while a script runs, by hooks and a sampler that decide nothing."""

from millstream.trace.profiled_run import ProfiledRun, Waiter
from millstream.trace.sync_finder import SyncTrace

__all__ = ["ProfiledRun", "SyncTrace", "Waiter"]
