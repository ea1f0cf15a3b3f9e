"""Work that Inductor is spared while it compiles."""

from millstream.lower.inductor.shortcuts.garbage import no_collections
from millstream.lower.inductor.shortcuts.propagation import values_kept
from millstream.lower.inductor.shortcuts.shortcuts import shortcuts

__all__ = ["no_collections", "shortcuts", "values_kept"]
