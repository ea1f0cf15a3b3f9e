"""Several devices in one program: what all kinds of devices have in common.

The engine for one device runs until it has settled, is a candidate ever after, and serves calls that cannot run
otherwise: the state is the user's, on their device, so that both meet the same.

**Contract**
- Results have the bits that one device gives, where it gives the same ones each time.
- Unless an engine was asked for, placement is kept only where it was measured to be faster than one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from millstream.cost import Costs
from millstream.engine.engine import Engine
from millstream.errors import InternalError
from millstream.graph import Candidate, Plan
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered
from millstream.schedule import plan_serial


class PlacedRunner(Protocol):
    """Runs a placed plan.

    Attributes:
        plan: It.
    """

    plan: Plan

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run a call: the list of inputs is emptied, the list of outputs returned."""
        ...

    def release(self) -> None:
        """Give memory back; the next call takes it again."""
        ...


class PlacedEngine(Engine):
    """Runs a program on one device until that has settled, and then on as many as are fastest.

    Args:
        lowered: What to run.
        one: Runs it on one device; ``None`` where it has no memory for that.
        asked: The engine that the user wants, whatever it takes; ``None`` leaves it open.
    """

    several: str
    """Name of the engine for several devices, where none was asked for."""

    def __init__(self, lowered: Lowered, one: Engine | None, *, asked: str | None) -> None:
        super().__init__(lowered, plan_serial(lowered.program.graph) if one is None else one.plan)
        self.name = asked or self.several if one is None else one.name
        self.one, self._asked = one, asked
        self._chosen: PlacedRunner | None = None
        self._costs: Costs | None = None
        self._settled = self._is_planning = False
        self._planning = ForkSafeLock()
        self._candidates: tuple[Candidate, ...] = ()

    @property
    def is_settled(self) -> bool:
        return self._settled

    @property
    def costs(self) -> Costs | None:
        return self._costs if self._chosen or self.one is None else self.one.costs

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._candidates or (() if self.one is None else self.one.candidates)

    @property
    def shares_memory(self) -> bool:
        return self._settled and self._chosen is None and self.one is not None and self.one.shares_memory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if not self._settled and (self.one is None or self.one.is_settled):
            self._settle(inputs)
        if self._settled and self._chosen is not None:
            return self._chosen(inputs)
        assert self.one is not None, "what does not fit on one device is placed"
        return self.one(inputs)

    def release(self) -> None:
        for engine in (self.one, self._chosen):
            if engine is not None:
                engine.release()

    def _settle(self, inputs: Sequence[Any]) -> None:
        """Find the plan; another call meanwhile, also one of a kernel's, runs on one device."""
        if not self._planning.lock.acquire(blocking=self.one is None):
            return
        try:
            if not self._settled and not self._is_planning:
                self._is_planning = True
                self._find_plan(inputs)
                self._settled = True
        finally:
            self._is_planning = False
            self._planning.lock.release()

    def _find_plan(self, inputs: Sequence[Any]) -> None:  # noqa: ARG002
        """Place, and take that if it was asked for, does not fit on one device, or is faster."""
        raise InternalError(f"Engine {self.name} places nothing.")

    def _choose(self, made: PlacedRunner, costs: Costs) -> None:
        self.plan, self.name, self._costs, self._chosen = made.plan, self._asked or self.several, costs, made
