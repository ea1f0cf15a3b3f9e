"""The command line: ``millstream explain``, ``profile``, ``doctor`` and others."""

from millstream.cli.command import main

__all__ = ["main"]
