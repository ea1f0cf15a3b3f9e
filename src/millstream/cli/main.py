"""Arguments of the command line and what each command does."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    raise NotImplementedError
