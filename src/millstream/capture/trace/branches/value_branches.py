"""Branches on a tensor's value: which way a trace takes, and what both ways must have in common to be one graph.

A step that skips a batch whose loss is not finite decides by a value that nobody knows while it is traced. It is traced
once for each outcome; ``passes.selecting`` has the graph compute both and select.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from millstream.capture.effects.host_effects import Effect, EffectCall, Output, Way, all_needs
from millstream.capture.effects.late_values import LateItem
from millstream.capture.lines import here, stopped_at
from millstream.capture.trace.outcome.traced_tensors import Leaving
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder, open_structure
from millstream.errors import CaptureError
from millstream.passes.selecting import DifferentWays

MOST_BRANCHES = 2
"""Of a step: each doubles the traces."""


@dataclass
class Ways:
    """The branches that one trace meets.

    Args:
        given: Outcomes of the first ones.
        is_on: Whether the step may branch at all.

    Attributes:
        taken: The outcomes with which the trace has gone on.
        values: Of each branch, a boolean without dimensions.
        lines: The user's.
        is_full: Whether it has met more than can be.
        num_effects: Of each branch, how many effects come before it.
        count_effects: How many there are by now.
    """

    given: tuple[bool, ...] = ()
    is_on: bool = True
    taken: list[bool] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_full: bool = False
    num_effects: list[int] = field(default_factory=list)
    count_effects: Callable[[], int] = lambda: 0

    def take(self, value: Tensor) -> bool | None:
        """The outcome with which the trace goes on; ``None`` where it cannot."""
        number = len(self.values)
        self.is_full = number == MOST_BRANCHES
        if not self.is_on or self.is_full or stopped_at() is not None:
            return None
        with torch.no_grad():
            self.values.append((value.detach() != 0).reshape(()))
        self.lines.append(here())
        self.num_effects.append(self.count_effects())
        self.taken.append(self.given[number] if number < len(self.given) else True)
        return self.taken[-1]

    def refuse_trace(self, error: CaptureError) -> CaptureError:
        """Return what is to be said where a trace fails after a branch, which may be why."""
        if self.is_full:
            return CaptureError(
                f"The step branches on tensors' values more than {MOST_BRANCHES} times.",
                where=error.where,
                remedy="Use torch.where, or PyTorch's while_loop for a loop.",
            )
        return self.refusal(len(self.lines) - 1, f"are not both captured: {error.reason}")

    def refusal(self, number: int, what: str) -> CaptureError:
        """Return why both ways of a branch are not one graph."""
        return CaptureError(
            f"The step branches on a tensor's value, and its two ways {what}.",
            where=self.lines[number],
            remedy="Use torch.where, or let both ways print, count, return and keep the same.",
        )


def check_alike(one: Leaving, other: Leaving) -> None:
    """Refuse ways that leave other things behind than tensors with other values.

    Raises:
        DifferentWays: They do.
    """
    if one.structure != other.structure or not _are_outputs_alike(one.outputs, other.outputs):
        raise DifferentWays("return results of different structure")
    if one.replaced != other.replaced or one.num_tensors != other.num_tensors:
        raise DifferentWays("do not keep the same tensors")


def are_effects_alike(one: EffectRecorder, other: EffectRecorder) -> bool:
    """Return whether both ways print, count and so on the same, but for values."""
    if len(one.program) != len(other.program) or any(effect.ways for effect in (*one.program, *other.program)):
        return False
    return one.outline == other.outline and all(map(_is_alike, one.program, other.program))


def join_effects(mine: Leaving, theirs: Leaving, number: int, way: Way, num_items: int, shift: int) -> None:
    """Have ``mine`` do what belongs to its way, and what belongs to the other one, each where it is taken.

    Args:
        mine: Of the way that the graph was recorded with.
        theirs: Of the other one.
        number: So many effects come before the branch.
        way: The first way.
        num_items: Numbers that the first way's effects read.
        shift: What is added to positions of the other graph's results.
    """
    one, other = mine.effects, theirs.effects
    if not all(map(_is_alike, one.program[:number], other.program[:number])):
        raise DifferentWays("are not the same up to there")
    for leaf in all_needs(other.program[number:], theirs.outputs):
        leaf.index += num_items if isinstance(leaf, LateItem) else shift
    its = replace(way, outcome=not way.outcome)
    program = [replace(effect, ways=(way, *effect.ways)) for effect in one.program[number:]]
    for effect in other.program[number:]:
        ways = (replace(each, index=each.index + shift) for each in effect.ways)
        program.append(replace(effect, ways=(its, *ways)))
    one.program[number:] = program
    mine.outputs = [
        replace(first, value=_Taken(way, first.value, _shifted(second.value, shift)), needs=first.needs | second.needs)
        if first.kind == "host"
        else first
        for first, second in zip(mine.outputs, theirs.outputs, strict=True)
    ]
    for reading in other.readings:
        reading.index += len(one.readings)
    one.readings += other.readings
    one.stacks += (stack + shift for stack in other.stacks)
    one.conditions += other.conditions
    one.waits = sorted({*one.waits, *other.waits})


@dataclass(frozen=True, slots=True)
class _Taken:
    """A number or text that is one in this way, and another in the other way."""

    way: Way
    here: Callable[[Any], Any]
    otherwise: Callable[[Any], Any]

    def __call__(self, values: Any) -> Any:
        return self.here(values) if self.way.is_taken(values) else self.otherwise(values)


def _shifted(value: Callable[[Any], Any], shift: int) -> Callable[[Any], Any]:
    """It, with ways that are decided by results ``shift`` positions further on."""
    if not isinstance(value, _Taken):
        return value
    way = replace(value.way, index=value.way.index + shift)
    return _Taken(way, _shifted(value.here, shift), _shifted(value.otherwise, shift))


def join_gradients(one: Leaving, other: Leaving, way: Way, where: str) -> list[EffectCall]:
    """Have ``one`` leave the gradients that either way does; the effects drop them where the other way is taken.

    Raises:
        DifferentWays: One way has changed a gradient in place, and the other one has put another there.
    """
    apart: tuple[list[Tensor], list[Tensor]] = [], []
    for index, gradient in enumerate(one.request.gradients):
        if one.left[index] == other.left[index]:
            if one.kept[index] != other.kept[index]:
                raise DifferentWays(f"do not leave the same gradient of {gradient.name} behind")
            continue
        apart[one.left[index]].append(gradient.parameter)
        if other.left[index]:
            one.left[index], one.kept[index] = True, other.kept[index]
    # What the other way leaves is dropped where the first one is taken.
    pairs = zip(apart, (way, replace(way, outcome=not way.outcome)), strict=True)
    return [_dropping(parameters, each, where) for parameters, each in pairs if parameters]


def _dropping(parameters: Sequence[Tensor], way: Way, where: str) -> EffectCall:
    def drop() -> None:
        for parameter in parameters:
            parameter.grad = None

    return EffectCall(drop, open_structure(((), {}), []), (), frozenset(), where, is_state=True, ways=(way,))


def _is_alike(one: Effect, other: Effect) -> bool:
    if isinstance(one, EffectCall) or isinstance(other, EffectCall):
        return isinstance(one, EffectCall) and isinstance(other, EffectCall) and one.where == other.where
    return one.location == other.location and _are_outputs_alike([one.output], [other.output])


def _are_outputs_alike(one: Sequence[Output], other: Sequence[Output]) -> bool:
    """Return whether they are the same but for values; of text and numbers the outline tells."""

    def key(output: Output) -> tuple[str, int, int]:
        return output.kind, output.index, 0 if output.kind == "host" else id(output.value)

    return [*map(key, one)] == [*map(key, other)]
