"""The command line: ``millstream train`` and ``millstream explain``."""

from millstream.cli.command import main

__all__ = ["main"]
