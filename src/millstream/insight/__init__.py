"""Find out why a device idles: recorded runs in, gaps, causes, gains and a diagnosis out. No torch, no clock."""

from millstream.insight.analysis import analyse
from millstream.insight.causes import SAMPLED, Cause
from millstream.insight.findings import RECEIVE_NS, Findings, Row, Severity
from millstream.insight.records import (
    Activity,
    ActivityKind,
    Asleep,
    HostSpan,
    LaunchCall,
    Loader,
    Note,
    ProfiledStep,
    Recording,
    Sample,
    Site,
    StreamWait,
)

__all__ = [
    "RECEIVE_NS",
    "SAMPLED",
    "Activity",
    "ActivityKind",
    "Asleep",
    "Cause",
    "Findings",
    "HostSpan",
    "LaunchCall",
    "Loader",
    "Note",
    "ProfiledStep",
    "Recording",
    "Row",
    "Sample",
    "Severity",
    "Site",
    "StreamWait",
    "analyse",
]
