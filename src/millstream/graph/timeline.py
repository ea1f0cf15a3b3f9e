"""Kernel runs by stream and time: from the simulator, or from a trace of the device. Frozen data without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on a stream.

    Attributes:
        name: Of the kernel or copy.
        stream: Where it ran.
        start_ns: When it began, since the begin of the run.
        end_ns: When it was over.
        kernel: Id of the kernel; ``None`` for a copy, and for what no plan knows.
    """

    name: str
    stream: int
    start_ns: int
    end_ns: int
    kernel: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One run.

    Attributes:
        spans: In the order in which they began.
        num_streams: Streams are numbered from 0.
        end_ns: When everything was over, since the begin of the run: the *makespan*.
    """

    spans: tuple[Span, ...]
    num_streams: int
    end_ns: int

    def busy_ns(self, stream: int) -> int:
        """Return how long a stream had work running."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.stream == stream)

    @property
    def idle_ns(self) -> int:
        """How long no stream at all had work running."""
        covered = latest = 0
        for span in self.spans:
            covered += max(0, span.end_ns - max(span.start_ns, latest))
            latest = max(latest, span.end_ns)
        return self.end_ns - covered
