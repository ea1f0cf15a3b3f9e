"""Reports on why the device idled: the first screen, a page, data for programs, a trace for Perfetto."""

from millstream.report.idle.compare import SLOWER, Condition, compare
from millstream.report.idle.page import to_page
from millstream.report.idle.profile_picture import to_picture
from millstream.report.idle.profile_trace import to_trace
from millstream.report.idle.screen import to_text

__all__ = ["SLOWER", "Condition", "compare", "to_page", "to_picture", "to_text", "to_trace"]
