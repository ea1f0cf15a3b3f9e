"""A plan that was considered, and what became of it. Frozen data without torch."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.graph.plan import Spread

CHOSEN = "chosen"
"""The outcome of the plan that runs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan among those that a choice was made from.

    Attributes:
        policy: Name of the policy that made it.
        streams: Streams that it uses.
        waits: Waits between them.
        peak_bytes: Most memory that its temporaries and outputs take at once.
        predicted_ns: Its time by the simulator; ``None`` when it was not simulated.
        measured_ns: Its time on the device; ``None`` when it was not run.
        outcome: ``CHOSEN``, or why not, in a few words.
        spread: How its kernels' blocks are spread over the device.
    """

    policy: str
    streams: int
    waits: int
    peak_bytes: int
    predicted_ns: int | None = None
    measured_ns: int | None = None
    outcome: str = ""
    spread: Spread = Spread.PACKED

    @property
    def is_chosen(self) -> bool:
        """Whether this is the plan that runs."""
        return self.outcome == CHOSEN
