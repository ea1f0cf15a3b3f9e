"""Lowered programs kept on disk, so that a later process finds them instead of lowering again.

``key.py`` says what a program depends on, ``encoding.py`` writes one as JSON and reads it, ``records.py`` brings both
to a file.
"""

from millstream.lower.kept.records import Record, open_record

__all__ = ["Record", "open_record"]
