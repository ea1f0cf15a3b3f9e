"""Pages and pictures from the templates of this package; what they are given stays text, whatever it says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.report.words import percent

if TYPE_CHECKING:
    from jinja2 import Environment

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def render(template: str, **values: Any) -> str:
    """Fill in a template of ``templates/``; paths are told from the working folder, or from that of the packages.

    Args:
        template: Name of the file; everything in its values is escaped.
        values: What the template names.
    """
    page = _environment().get_template(template).render(**values)
    folder = f"{Path.cwd()}/"
    page = page.replace(folder, "") if len(folder) > 2 else page
    return _FORBIDDEN.sub("�", re.sub(r"/[^\s\"'<>:]*/site-packages/", "", page))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only who writes a page loads it

    made = Environment(
        loader=PackageLoader("millstream.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters["share"] = _share
    return made


def _share(part: float) -> str:
    return percent(part, 1)
