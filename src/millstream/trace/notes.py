"""Recompilations and graph breaks, from what Dynamo says of them."""

from __future__ import annotations

from collections.abc import Iterable

from millstream._torch.compiler import compile_events
from millstream.insight import Cause, Note, Site


def notes_of(breaks: Iterable[tuple[int, str]], began_unix_ns: int, began_ns: int) -> list[Note]:
    """Return what was compiled again, and what broke a graph, since a moment.

    Args:
        breaks: When, and Dynamo's text.
        began_unix_ns: The moment, in Unix time.
        began_ns: The same on the recording's clock.
    """
    found = []
    for each in compile_events.recompilations(began_unix_ns):
        at_ns = each.at_ns - began_unix_ns + began_ns
        found.append(Note(Cause.COMPILE, at_ns, Site(each.file, each.line, each.function), _reason(each.reason)))
    return found + [_break_note(at_ns, text) for at_ns, text in breaks]


def _reason(text: str) -> str:
    """The guard that failed, without the numbers of the compilation."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line.partition(": ")[2] or line


def _break_note(at_ns: int, text: str) -> Note:
    """A graph break, from Dynamo's log of it."""
    first, *rest = text.splitlines() or [""]
    file, _, line = first.rpartition(" at ")[2].rpartition(":")
    reason = next((each.partition(": ")[2] for each in rest if each.startswith("Graph Break Reason")), "")
    explanation = next((each.strip() for each in rest if each.strip().startswith("Explanation:")), "")
    site = Site(file, int(line)) if line.strip().isdigit() else None
    return Note(Cause.GRAPH_BREAK, at_ns, site, explanation.partition(": ")[2] or reason or first)
