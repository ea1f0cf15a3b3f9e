"""Random numbers that the host draws before each replay, and what a graph reads of them.

**Contract**
- Numbers are drawn in the order of the program, each once a call.
- Where the graph does not hold for what was drawn, the generators are put back: nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millstream.capture.effects.expressions import (
    FAILURES,
    Always,
    Ask,
    Draw,
    GraphRead,
    Nth,
    compile_steps,
    indices_in,
)
from millstream.capture.effects.host_generators import set_state, state_of


class Drawing:
    """Draws for one graph.

    Args:
        steps: Questions, inputs and draws, in the order of the program.
        first: Where numbers that are drawn come among all.
    """

    def __init__(self, steps: Sequence[Ask | GraphRead | Draw], first: int) -> None:
        waiting = [step for step in steps if isinstance(step, Draw) or max(indices_in(step.of), default=-1) >= first]
        # What does not depend on what is drawn comes before it: if that fails, nothing was drawn yet.
        self._holds = compile_steps([step for step in steps if not any(step is each for each in waiting)])
        self._draw = compile_steps(steps, is_drawing=True)
        self._first = first
        draws = [step for step in waiting if isinstance(step, Draw)]
        kinds = [draw.kind for draw in draws]
        can_fail = not all(_is_safe(step, first, kinds) for step in waiting)
        self._generators = [*{id(draw.generator): draw.generator for draw in draws}.values()] if can_fail else []

    def __call__(self, numbers: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
        """Return what the graph reads, and what was drawn; ``None`` where the graph does not hold."""
        given = [*numbers, *[None] * (self._first - len(numbers))]
        derived = states = None
        try:
            if self._holds(given) is None:
                return None
            states = [(generator, state_of(generator)) for generator in self._generators]
            derived = self._draw(given)
        except FAILURES:
            pass
        finally:
            if derived is None:
                for generator, state in states or ():
                    set_state(generator, state)
        return None if derived is None else (derived, given[self._first :])


@contextmanager
def undrawn(generators: Iterable[Any]) -> Iterator[None]:
    """Put generators back at the end of the context to where they were."""
    states = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            set_state(generator, state)


def _is_safe(step: Ask | GraphRead | Draw, first: int, kinds: Sequence[Any]) -> bool:
    """Return whether a step cannot fail in one call if it has not in another."""
    if isinstance(step, Draw):
        operands = step.of.operands
        is_fixed = all(isinstance(each, Always) and isinstance(each.value, int | float) for each in operands)
        return is_fixed and not step.name.endswith("choice")
    if not (isinstance(step, GraphRead) and isinstance(step.of, Nth)):
        return False
    kind = kinds[step.of.index - first]
    return kind is float or isinstance(kind, tuple)  # the graph reads every array of a kind
