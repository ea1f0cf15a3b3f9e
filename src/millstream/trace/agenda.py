"""Decide when the sampler looks, and when the device's profiler is on. Reads no clock.

Looks are at times that do not follow from what the program does. A look that comes late because the interpreter was
held is made when that is over. Were the next one planned from there, or at equal distances, then looks at a loop as
long as the time between two of them would always find it at the same place. So time is cut into equal intervals, and
one look is planned in each, at any moment of it: the share of planned moments in which a program does something is, on
average, that of the time, however long its steps are.
"""

from __future__ import annotations

import random
from enum import StrEnum

FIRST_STEP = 10  # window A begins after the warm-up
MOST_STEPS, LEAST_STEPS = 20, 6  # of window A: what is written down every tenth step is seen; three are left to judge
BETWEEN_STEPS = 2  # windows: what the first one leaves to do is over
MOST_LINED_STEPS, LEAST_LINED_STEPS = 3, 2  # of window B: one of them is seen whole
ENOUGH_NS = 2_000_000_000  # for a window: steps of a tenth of a second or more are alike sooner than short ones
FAR_NS = 10_000_000_000  # after a pause of the whole process, moments of so long ago are not caught up with


class Agenda:
    """The moments that looks are planned for.

    Args:
        now: When it begins.
        interval_ns: Of the time between two looks, on average.
        dice: A generator of its own: the program's are left alone.

    Attributes:
        interval_ns: May be changed at any time, and holds from the look after next on.
        due_ns: When the next look is due.
    """

    def __init__(self, now: int, interval_ns: int, dice: random.Random | None = None) -> None:
        self.interval_ns = interval_ns
        self._dice = dice or random.Random()
        self._edge = now
        self.due_ns = now
        self._advance()

    def skip_to(self, now: int) -> None:
        """Leave out moments that have passed during a look: the program may have been held by that."""
        if now - self._edge > FAR_NS:
            self._edge = self.due_ns = now
        while self.due_ns < now:
            self._advance()

    def take(self, held_until: int) -> tuple[int, ...]:
        """The look that was due is made now, after somebody held the interpreter.

        Args:
            held_until: When that was over. Moments that were planned meanwhile have no look of their own.

        Returns:
            How long the interpreter was held from the planned moment on, and from each of the others.
        """
        due = self.due_ns
        held = [max(held_until - due, 0)]
        self._advance()
        while self.due_ns < min(held_until, due + FAR_NS):
            held.append(held_until - self.due_ns)
            self._advance()
        return tuple(held)

    def _advance(self) -> None:
        self.due_ns = self._edge + self._dice.randrange(self.interval_ns)
        self._edge += self.interval_ns


class Turn(StrEnum):
    """The next action on the device's profiler after a step."""

    BEGIN = "begin window A"
    END = "end window A"
    BEGIN_LINED = "begin window B"
    END_LINED = "end window B"


class Windows:
    """Some steps for the device's profiler: window A for times, and later window B for lines.

    A window is over after a number of steps, or once it has lasted ``ENOUGH_NS`` and has the fewest that say anything:
    of a large model, twenty steps are minutes, and millions of records.

    Attributes:
        over: The step after which both are; ``None`` until then.
    """

    def __init__(self) -> None:
        self.over: int | None = None
        self._next, self._since, self._since_ns = FIRST_STEP, 0, 0
        self._turn = Turn.BEGIN

    def taken(self, now: int) -> None:
        """The turn has been taken: starting the device's profiler takes a second or two, which are none of a window."""
        self._since_ns = now

    def at_step(self, number: int, now: int) -> Turn | None:
        """Return what to do now.

        Args:
            number: How many steps there were; goes up by one.
            now: A clock's time.
        """
        if self.over is not None:
            return None
        if self._turn in (Turn.BEGIN, Turn.BEGIN_LINED):
            is_due = number >= self._next
        else:
            is_lined = self._turn is Turn.END_LINED
            most, least = (MOST_LINED_STEPS, LEAST_LINED_STEPS) if is_lined else (MOST_STEPS, LEAST_STEPS)
            num_steps, lasted_ns = number - self._since, now - self._since_ns
            is_due = num_steps >= most or (num_steps >= least and lasted_ns >= ENOUGH_NS)
        if not is_due:
            return None
        turn, turns = self._turn, list(Turn)
        self._since, self._since_ns, self._next = number, now, number + BETWEEN_STEPS
        if turn is turns[-1]:
            self.over = number
        else:
            self._turn = turns[turns.index(turn) + 1]
        return turn
