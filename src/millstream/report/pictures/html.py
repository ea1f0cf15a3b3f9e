"""Pictures as one HTML file that opens anywhere, without network: zoom, pan, search, details of what is pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.report.pages import render
from millstream.report.pictures.picture import COLOURS, CRITICAL, Picture, describe

if TYPE_CHECKING:
    from millstream.report.details import Section


def to_html(
    pictures: Sequence[Picture],
    title: str = "Millstream",
    sections: Sequence[Section] = (),
    fallbacks: Sequence[str] = (),
) -> str:
    """Write pictures and their viewer; a menu chooses among several pictures.

    Args:
        pictures: What to draw.
        title: Of the page.
        sections: What goes below them.
        fallbacks: What was not captured, and why; told where there are sections.
    """
    data = {"colours": {**COLOURS, "critical path": CRITICAL}, "pictures": [_data(picture) for picture in pictures]}
    return render(
        "explain.html", title=title, data=data, sections=sections, fallbacks=fallbacks, has_details=bool(sections)
    )


def _data(picture: Picture) -> dict[str, Any]:
    return {
        "title": picture.title,
        "caption": picture.caption,
        "streams": picture.num_streams,
        "lanes": picture.lanes,
        "end": picture.end_ns,
        "bars": [
            [
                *(bar.stream, bar.start_ns, bar.end_ns, bar.kind, bar.is_critical, bar.label, describe(bar)),
                None if bar.kernel is None else bar.kernel.id,
            ]
            for bar in picture.bars
        ],
        "arrows": [[arrow.source, arrow.target] for arrow in picture.arrows],
    }
