"""The command line: ``millstream train``, ``millstream explain`` and ``millstream doctor``."""

from millstream.cli.command import main

__all__ = ["main"]
