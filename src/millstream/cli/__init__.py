"""The command line: ``millstream train`` and ``millstream explain``."""

from millstream.cli.main import main

__all__ = ["main"]
