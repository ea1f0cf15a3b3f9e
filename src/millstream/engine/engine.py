"""The base class of all engines, which run programs, and the known facts of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from millstream.cost import Costs
from millstream.errors import ArgumentError, InternalError
from millstream.graph import Candidate, Plan, Wait
from millstream.lower import Lowered
from millstream.schedule import peak_bytes


class Engine:
    """Runs one plan of a program. Given a list of inputs, which it may empty, returns the list of outputs.

    Every engine implements a call; what an engine knows of itself beyond that, it says by the properties below.

    Args:
        lowered: What to run.
        plan: Its plan; an engine that finds a better one puts it here.

    Attributes:
        name: Of the engine, as ``engine=`` has it.
        notes: Why it does not run as asked for, or not as well as it might; empty when it does.
        tried: What came of alternatives to its kernels.
        gives_memory_back: Whether what ``release`` gives back goes to the device, rather than to a pool for others.
    """

    name: str

    def __init__(self, lowered: Lowered, plan: Plan) -> None:
        self.lowered, self.plan = lowered, plan
        self.notes: list[str] = []
        self.tried = lowered.tried
        self.gives_memory_back = False

    def __call__(self, inputs: list[Any]) -> list[Any]:  # noqa: ARG002
        raise InternalError(f"Engine {self.name} runs nothing.")

    def run_uncaptured(self, inputs: list[Any]) -> list[Any]:
        """Run a call without capturing or replaying anything: for calls that are rare."""
        return self(inputs)

    def release(self) -> None:
        """Give back the memory held between calls, if there is any; the next call takes it again."""

    def replay(self) -> None:
        """Replay what is captured on the inputs of the latest call, without copies in or out: for measurements.

        Raises:
            ArgumentError: This engine captures nothing.
        """
        raise ArgumentError(f"Engine {self.name} has nothing to replay; engine='graph' on a CUDA device has.")

    def replays_unchanged(self) -> AbstractContextManager[Callable[[], None]]:
        """Give a function that replays what is captured on what it holds; put back what it wrote: for measurements.

        Raises:
            InternalError: ``why_not_replay`` says why not.
        """
        raise InternalError(f"{self.lowered.program.graph.name}: {self.why_not_replay()}.")

    def why_not_replay(self) -> str:
        """Say in a few words why nothing can be replayed beside calls; empty when it can."""
        return f"the engine {self.name} is not traced on a device"

    @property
    def is_settled(self) -> bool:
        """Whether the plan is the one that will run from now on."""
        return True

    @property
    def is_captured(self) -> bool:
        """Whether calls are replays by now."""
        return False

    @property
    def shares_memory(self) -> bool:
        """Whether its temporaries lie in memory that it has in turn with other sizes of the program."""
        return False

    @property
    def costs(self) -> Costs | None:
        """What its kernels were measured to cost; ``None`` where nothing was measured."""
        return None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The plans among which its own was chosen; empty where there was no choice."""
        return ()

    @property
    def num_in_place(self) -> int:
        """How many graphs read inputs where callers have them, beside the one that copies them."""
        return 0

    @property
    def object_bytes(self) -> int:
        """About what its CUDA graph takes of the device beside tensors; 0 where there is none."""
        return 0

    @property
    def num_kernels(self) -> int:
        return len(self.plan.graph.kernels)

    @property
    def num_streams(self) -> int:
        return self.plan.num_streams

    @property
    def num_waits(self) -> int:
        return sum(isinstance(step, Wait) for step in self.plan.steps)

    @property
    def peak_bytes(self) -> int:
        """Most memory that temporaries and outputs take at one time."""
        return peak_bytes(self.plan)

    @property
    def compile_seconds(self) -> float:
        return self.lowered.seconds
