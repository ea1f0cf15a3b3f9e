"""What people see: explanations as text and as data."""

from millstream.report.explanation import Explanation, ProgramReport

__all__ = ["Explanation", "ProgramReport"]
