"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def size(num_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"))


def operations(flops: int) -> str:
    """Operations in the unit that suits them; a dash for none."""
    return _scaled(flops, ("", "k", "M", "G", "T", "P")) if flops else "–"


def duration(time_ns: float | None) -> str:
    """A time in the unit that suits it; a dash for none."""
    return "–" if time_ns is None else _scaled(time_ns, ("ns", "µs", "ms", "s"))


def percent(part: float, whole: float) -> str:
    """A share in whole percent; nothing is 0 % of nothing."""
    return f"{part / whole if whole else 0:.0%}".replace("%", " %")


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 wait``, ``2 waits``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, width: int) -> str:
    """Cut a text to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Lay out rows under a head; the columns in ``right`` are set flush right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        if value < 999.5 or unit == units[-1]:  # 999.6 would be written as 1e+03
            break
        value /= 1000
    return f"{value:.3g} {unit}".rstrip() if value < 999.5 else f"{value:.0f} {unit}".rstrip()
