"""The user's requests to the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from millstream.errors import ArgumentError
from millstream.graph import PLANNED_ROLES, Plan
from millstream.schedule.memory.lifetimes import peak_bytes
from millstream.schedule.policies import POLICIES

HAND_STREAMS = 8  # ``streams="manual"`` takes as many as are written down, and at most so many
MOST_STREAMS = 1024  # more than any device runs at one time; a plan keeps books for each
GRANULE_BYTES = 2 << 20  # PyTorch's allocator takes no less from a GPU: so much more never counts as too much

Tune = Literal["auto", "first", "background", "now"]
"""When something is measured to be chosen from."""


@dataclass(frozen=True)
class Scheduling:
    """The user's requests to the schedule.

    Attributes:
        streams: How many streams at most; ``None`` chooses by measuring.
        policy: Name of a policy; ``None`` chooses.
        memory: Budget: for temporaries and outputs in bytes as an ``int``, or as a ``float`` a factor of all that the
            program holds when it runs on one stream, parameters and inputs included.
        tune: When a plan is chosen: by the first calls (``auto``, ``first``), or between later ones (``background``).
            What is chosen from is the same. With ``now``, alternatives to kernels are tried by the first calls, too.
    """

    streams: int | None = None
    policy: str | None = None
    memory: float | int = 1.25
    tune: Tune = field(default="auto", repr=False)  # a choice on disk serves all

    def __post_init__(self) -> None:
        if self.tune not in get_args(Tune):
            raise ArgumentError(f"tune={self.tune!r} says not when; choose 'auto', 'first', 'background' or 'now'.")
        if self.streams is not None and (
            not isinstance(self.streams, int) or isinstance(self.streams, bool) or self.streams < 1
        ):
            raise ArgumentError(f"streams={self.streams!r} leaves nowhere to run; give 1 or more, or 'auto'.")
        if self.streams is not None and self.streams > MOST_STREAMS:
            raise ArgumentError(f"streams={self.streams} is more than can be planned; give at most {MOST_STREAMS}.")
        if self.policy is not None and (not isinstance(self.policy, str) or self.policy not in POLICIES):
            raise ArgumentError(f"Unknown policy {self.policy!r}; choose one of {', '.join(map(repr, POLICIES))}.")
        if isinstance(self.memory, bool) or not isinstance(self.memory, (int, float)):
            raise ArgumentError(f"memory={self.memory!r} is no amount; give bytes as an int, or a factor as a float.")
        if isinstance(self.memory, float) and not 1 <= self.memory < inf:
            raise ArgumentError(
                f"memory={self.memory} is no factor of what one stream needs; give 1.0 or more, or bytes as an int."
            )

    @property
    def serial(self) -> bool:
        """Whether only one stream is asked for."""
        return self.streams == 1 or self.policy == "serial"

    def budget_bytes(self, serial: Plan, granule_bytes: int = GRANULE_BYTES) -> int:
        """Return the budget for temporaries and outputs in bytes; so much more than one stream takes is always allowed.

        Raises:
            ArgumentError: One stream needs more.
        """
        needed = peak_bytes(serial)
        if isinstance(self.memory, float):
            owned = (buffer for buffer in serial.graph.buffers if buffer.alias_of is None)
            held = needed + sum(buffer.num_bytes for buffer in owned if buffer.role not in PLANNED_ROLES)
            return needed + max(int(held * (self.memory - 1)), granule_bytes)
        budget = int(self.memory)
        if budget < needed:
            raise ArgumentError(
                f"memory={self.memory} bytes is too little: {serial.graph.name} needs {needed} bytes for its "
                "temporaries and outputs on one stream; give at least that."
            )
        return budget
