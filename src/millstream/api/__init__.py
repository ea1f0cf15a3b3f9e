"""The public functions: they compose capture, lowering, engines, feeding and reports, and decide nothing themselves."""

from millstream.api.callbacks import callback
from millstream.api.compiling import compile, dynamo_backend
from millstream.api.environment import version_report
from millstream.api.explaining import exchanges, executables, explain, is_compiled
from millstream.api.precompiling import precompile
from millstream.api.profiling import Profile, profile, trace_syncs
from millstream.api.programs import load_programs, save_programs
from millstream.api.stepping import step
from millstream.capture.step.regions.islands import eager_region
from millstream.data import feed
from millstream.data_parallel.sharding.optimizer import full_state_dict

__all__ = [
    "Profile",
    "callback",
    "compile",
    "dynamo_backend",
    "eager_region",
    "exchanges",
    "executables",
    "explain",
    "feed",
    "full_state_dict",
    "is_compiled",
    "load_programs",
    "precompile",
    "profile",
    "save_programs",
    "step",
    "trace_syncs",
    "version_report",
]
