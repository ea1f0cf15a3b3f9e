"""Lowered programs kept on disk, so that a later process finds them instead of lowering again.

``key.py`` says what a program depends on, ``encoding.py`` writes one as JSON and reads it, ``tuners.py`` does so with
its Triton kernels, and ``records.py`` brings all to a file. ``bundle.py`` takes what a process has used (``used.py``)
to another machine.
"""

from millstream.lower.kept.program_files import FileContent, ProgramFile, open_record

__all__ = ["FileContent", "ProgramFile", "open_record"]
