"""When the sampler looks: at times that do not follow from what the program does.

A look that comes late because the interpreter was held is made when that is over. Were the next one planned from
there, or at equal distances, then looks at a loop as long as the time between two of them would always find it at the
same place. So time is cut into equal intervals, and one look is planned in each, at any moment of it: the share of
planned moments in which a program does something is, on average, that of the time, however long its steps are.
"""

from __future__ import annotations

import random

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
