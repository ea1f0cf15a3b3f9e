"""Work that Inductor is spared while it compiles."""

from millstream.lower.inductor.shortcuts.aten_graphs import options_for_aten, unwatched_first_run
from millstream.lower.inductor.shortcuts.garbage import no_collections
from millstream.lower.inductor.shortcuts.propagation import values_kept
from millstream.lower.inductor.shortcuts.shortcuts import shortcuts

__all__ = ["no_collections", "options_for_aten", "shortcuts", "unwatched_first_run", "values_kept"]
