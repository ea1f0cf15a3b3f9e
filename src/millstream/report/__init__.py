"""Reports for people: explanations as text and as data, timelines as pictures."""

from millstream.report.account import Account
from millstream.report.explanation import Explanation
from millstream.report.pictures.html import to_html
from millstream.report.pictures.perfetto import to_perfetto
from millstream.report.pictures.picture import Arrow, Bar, Picture, draw_timeline
from millstream.report.pictures.svg import to_svg
from millstream.report.pictures.terminal import sketch_streams
from millstream.report.program_report import ProgramReport
from millstream.report.saved import SavedStep, read_steps, saved_steps
from millstream.report.size_report import OneSize
from millstream.report.traffic import Arrivals, CommunicationReport

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
