"""What people see: explanations as text and as data, timelines as pictures."""

from millstream.report.account import Account
from millstream.report.communication import Arrivals, CommunicationReport
from millstream.report.explanation import Explanation, ProgramReport
from millstream.report.html import to_html
from millstream.report.perfetto import to_perfetto
from millstream.report.picture import Arrow, Bar, Picture, draw_timeline
from millstream.report.saved import SavedStep, read_steps, saved_steps
from millstream.report.sizes import OneSize
from millstream.report.svg import to_svg
from millstream.report.terminal import sketch_streams

__all__ = [
    "Account",
    "Arrivals",
    "Arrow",
    "Bar",
    "CommunicationReport",
    "Explanation",
    "OneSize",
    "Picture",
    "ProgramReport",
    "SavedStep",
    "draw_timeline",
    "read_steps",
    "saved_steps",
    "sketch_streams",
    "to_html",
    "to_perfetto",
    "to_svg",
]
