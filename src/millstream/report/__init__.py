"""What people see: explanations as text and as data, timelines as pictures."""

from millstream.report.account import Account
from millstream.report.explanation import Explanation, ProgramReport
from millstream.report.html import to_html
from millstream.report.perfetto import to_perfetto
from millstream.report.picture import Arrow, Bar, Picture, draw_timeline
from millstream.report.sizes import OneSize
from millstream.report.svg import to_svg
from millstream.report.terminal import sketch_streams

__all__ = [
    "Account",
    "Arrow",
    "Bar",
    "Explanation",
    "OneSize",
    "Picture",
    "ProgramReport",
    "draw_timeline",
    "sketch_streams",
    "to_html",
    "to_perfetto",
    "to_svg",
]
