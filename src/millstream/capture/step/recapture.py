"""Why there is another graph: what of a call differs from the call of the graph before."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor

from millstream.capture.guards.breaks import Break
from millstream.capture.record.location import MISSING
from millstream.capture.state.signature import TensorSpec
from millstream.capture.step.calls import CallForm, StepCall, text_of_tensor
from millstream.capture.step.graph import StepGraph
from millstream.progress import LOGGER
from millstream.tree.spec import SCALARS, Leaf, Number, PlainValue

MOST_CAPTURES = 100
"""Captures that are remembered, the last ones."""

MOST_CHARACTERS = 60
"""Of a value that is shown."""

_SPEC = ("shape", "dtype", "device", "strides", "requires_grad", "conjugation or negation")


@dataclass(frozen=True, slots=True)
class CaptureCause:
    """Why a graph was captured."""

    text: str  # such as "epoch is 3, was 2"
    place: Any = None  # what differed, without its values; ``None`` for nothing


FIRST = CaptureCause("the first call that could be captured")
OTHERWISE = CaptureCause("what the graph before took for granted does not hold", "")
DRAWN = CaptureCause("a random number leads another way", "random numbers")


@dataclass
class History:
    """The captures of one step.

    Args:
        name: Of the step.
    """

    name: str
    captures: deque[tuple[CaptureCause, float]] = field(
        default_factory=lambda: deque(maxlen=MOST_CAPTURES)
    )  # and seconds
    _told: set[Any] = field(default_factory=set)

    def note(self, cause: CaptureCause, seconds: float) -> None:
        """Note a capture; the second one in a row for the same reason is told, once."""
        before = self.captures[-1][0].place if self.captures else None
        self.captures.append((cause, seconds))
        if cause.place is None or cause.place != before or cause.place in self._told:
            return
        self._told.add(cause.place)
        LOGGER.warning(
            "%s: captured again in %.1f s, for the same reason as the time before: %s. ms.explain has all captures.",
            self.name,
            seconds,
            cause.text,
        )

    def lines(self) -> list[str]:
        """Each capture with its cause, for people."""
        return [f"{self.name}, in {seconds:.1f} s: {cause.text}" for cause, seconds in self.captures]


def cause_of(graphs: Sequence[StepGraph], others: Iterable[StepGraph], call: StepCall) -> CaptureCause:
    """Why none of the graphs serves a call.

    Args:
        graphs: Those that might have, the one kept last first.
        others: All that there are, the one used last at the end; the call is compared with the nearest.
        call: The call.
    """
    for graph in graphs:
        if graph.sizes is not None and not graph.sizes.hold(call.arguments):
            continue
        if (change := graph.guards.broken()) is not None:
            return _cause_of_break(change)
        changed = graph.changed_number(call.given)
        if changed is None:
            return DRAWN if graph.questions.drawn else OTHERWISE
        return _changed(*changed)
    form = call.form
    nearest = min(reversed([*others]), key=lambda graph: _num_differences(graph.form, form), default=None)
    return FIRST if nearest is None else _difference(nearest, form)


def _num_differences(before: CallForm, now: CallForm) -> int:
    return sum(old != new for old, new in zip_longest(before.parts(), now.parts())) + (before.modes != now.modes)


def _cause_of_break(change: Break) -> CaptureCause:
    if change.location is None or change.before is MISSING is change.now:
        return CaptureCause(change.reason.rstrip("."), change.reason)
    return _changed(str(change.location), change.before, change.now)


def _changed(name: str, before: Any, now: Any) -> CaptureCause:
    old, new = _shown(before), _shown(now)
    return CaptureCause(
        f"{name} is {new.replace('a ', 'another ', 1)}" if old == new else f"{name} is {new}, was {old}", name
    )


def _shown(value: Any) -> str:
    if value is MISSING:
        return "not there"
    if isinstance(value, Tensor):
        return f"a tensor, {text_of_tensor(value.shape, value.dtype)}"
    if not isinstance(value, SCALARS):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _difference(graph: StepGraph, now: CallForm) -> CaptureCause:
    """The first thing in which a call differs from that of a graph; sizes come last, as they may be symbols of it."""
    before, resized = graph.form, []
    for old, new in zip_longest(before.parts(), now.parts()):
        if old is None or new is None or old[0] != new[0]:
            if old is not None and new is not None and new[0].startswith(old[0]):
                return CaptureCause(f"another {old[0]} came: such objects are taken apart from now on", "structure")
            name = new[0] if new is not None else old[0] if old is not None else ""
            return CaptureCause(f"{name} was not there, or at another place", "structure")
        (name, then, value), (_, part, value_now) = old, new
        if isinstance(then, Leaf) and then == part:
            if (cause := _difference_of_tensors(name, value, value_now)) is not None:
                return cause
            if value[0] != value_now[0]:
                symbols = () if graph.sizes is None else graph.sizes.dimensions.get(then.index, ())
                resized.append((name, value, value_now, _changed_dimensions(value[0], value_now[0], symbols)))
        elif then != part:
            is_plain = isinstance(then, PlainValue | Number) and isinstance(part, PlainValue | Number)
            return (
                _changed(name, value, value_now) if is_plain else CaptureCause(f"{name} is another than before", name)
            )
    if resized:
        name, old, new, _ = next((each for each in resized if each[3]), resized[0])
        text = f"{name} is {text_of_tensor(*new[:2])}, was {text_of_tensor(*old[:2])}"
        return CaptureCause(text, ("sizes", *((name, dimensions) for name, _, _, dimensions in resized if dimensions)))
    if before.settings is not now.settings:
        names = ", ".join(switch.name for switch in now.settings.changed_since(before.settings))
        return CaptureCause(f"switches have other values: {names}", names)
    if before.modes != now.modes:
        return CaptureCause("it is called under other modes: gradients on or off, autocast, a default device", "modes")
    return CaptureCause(
        "a container among the arguments has another class, other keys, or them in another order", "structure"
    )


def _difference_of_tensors(name: str, before: TensorSpec, now: TensorSpec) -> CaptureCause | None:
    """In what else than sizes, and strides that follow from them, two tensors differ."""
    for index, what in enumerate(_SPEC):
        if index and before[index] != now[index] and (what != "strides" or before[0] == now[0]):
            return CaptureCause(f"{what} of {name} is {now[index]}, was {before[index]}", (what, name))
    return None


def _changed_dimensions(before: Sequence[int], now: Sequence[int], symbols: Container[int]) -> tuple[Any, ...]:
    """Those that are no symbols; a size of 0 or 1, which never is one, is told from others."""
    if len(before) != len(now):
        return ("dimensions",)
    pairs = enumerate(zip(before, now, strict=True))
    changed = [(at, new if new < 2 else None) for at, (old, new) in pairs if old != new]
    return tuple((at, small) for at, small in changed if at not in symbols or small is not None)
