"""Pictures as one HTML file that opens anywhere, without network: zoom, pan, search, details of what is pointed at."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from millstream.report.pictures.picture import COLOURS, CRITICAL, Picture, describe


def to_html(pictures: Sequence[Picture], title: str = "Millstream", details: str = "") -> str:
    """Write pictures and their viewer; a menu chooses among several pictures.

    Args:
        pictures: What to draw.
        title: Of the page.
        details: HTML to go below them.
    """
    data = {"colours": {**COLOURS, "critical path": CRITICAL}, "pictures": [_data(picture) for picture in pictures]}
    values = {
        "TITLE": escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        # Only "<" could end a script element: with it escaped, no kernel's name can, whatever it says.
        "DETAILS": details,
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    viewer = resources.files("millstream.report.pictures").joinpath("viewer.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(TITLE|DETAILS|DATA)\}\}", lambda slot: values[slot[1]], viewer)


def _data(picture: Picture) -> dict[str, Any]:
    return {
        "title": picture.title,
        "caption": picture.caption,
        "streams": picture.num_streams,
        "lanes": picture.lanes,
        "end": picture.end_ns,
        "bars": [
            [bar.stream, bar.start_ns, bar.end_ns, bar.kind, bar.is_critical, bar.label, describe(bar)]
            for bar in picture.bars
        ],
        "arrows": [[arrow.source, arrow.target] for arrow in picture.arrows],
    }
