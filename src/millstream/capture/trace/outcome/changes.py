"""Changes of a traced step to Python values and optimizers: done again after each replay, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from millstream.capture.effects.expressions import Always
from millstream.capture.effects.host_effects import EffectWrite, Extend, Output
from millstream.capture.record.location import MISSING, Location
from millstream.capture.record.paths import places_of
from millstream.capture.record.recorder import Recorder as Record
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.signature import is_same
from millstream.capture.state.snapshot import Change, HolderKind, StateSnapshot, is_type_of_tracing
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import as_scalar, is_known_later, is_number, is_scalar
from millstream.capture.trace.numbers.users_numbers import UsersNumbers
from millstream.capture.trace.patches.optimizers import is_schedulers
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.capture.trace.request import Disturbed, FirstChange, NumbersChanged, OneShot, Request, StateMissing
from millstream.capture.trace.twins import is_traced
from millstream.capture.trace.watches.given_tensors import fits
from millstream.errors import CaptureError
from millstream.tree.spec import SCALARS

_NOTES = frozenset(
    """
    _opt_called _step_supports_amp_scaling _warned_capturable_if_run_uncaptured grad_scale found_inf
    """.split()
)
"""Attributes of optimizers in which PyTorch notes what does not matter to a graph."""

CALLBACK_REMEDY = "Move this out of the step, or let ms.callback do it, as in ms.callback(losses.append, loss)."


@dataclass
class Changes:
    """Compares what the step reaches with what was there before it ran.

    Attributes:
        request: What is traced.
        questions: What the step asks of its numbers.
        recorder: Has the list of what is done after a replay, to which writes are added.
        snapshot: What was there.
        record: What the step reads and writes.
        numbers: Those of the request, as they were.
        written: The latest write to each place, as far as it is among the effects.
        unread: Where other threads have written before, and the step has read nothing; see ``note_unread``.
        appended: By id, containers that were appended, and to which list.
        grown: By id, how long lists are that the step only lets grow, as far as that is among the effects.
    """

    request: Request
    questions: Questions
    recorder: EffectRecorder
    snapshot: StateSnapshot
    record: Record
    numbers: UsersNumbers
    written: dict[Location, Change] = field(default_factory=dict)
    unread: set[Location] = field(default_factory=set)
    grown: dict[int, int] = field(default_factory=dict)
    appended: dict[int, int] = field(default_factory=dict)

    def note_unread(self) -> None:
        """Note where the step has read nothing, of the places that other threads have written before."""
        self.unread = {place for place in self.request.disturbed if not self.record.has_read(place)}

    def numbers_missing(self) -> list[Location]:
        """Places of numbers that the step has changed so far, and that the request does not have."""
        changed = [change for change in self.snapshot.changes() if _is_count(change)]
        return [change.location for change in changed if not is_scalar(change.before)]

    def keep(self, copies: list[tuple[Tensor, Tensor]]) -> list[Change]:  # noqa: C901, PLR0912  one line per kind of change
        """Note what becomes of optimizers' state and of Python objects; refuse what no graph can do again.

        Args:
            copies: Gets what is to be copied into optimizers' state, and where.

        Returns:
            Where the function stored tensors.
        """
        given = {*map(id, self.request.arguments), *(id(entry.tensor) for entry in self.request.state)}
        stored: list[Change] = []
        counted: list[Change] = []
        settled: set[Any] = set()
        for change in self.note_writes():
            before, after = change.before, change.after
            is_users = change.kind in (HolderKind.PLAIN, HolderKind.MODULE)
            if _is_count(change):
                counted.append(change)
            elif _is_write(change):
                if change.location.key != "training":
                    settled.add((change.location, _form_of(before), _form_of(after)))
            elif is_schedulers(after):
                pass  # it puts it there itself
            elif self._is_growth(change):
                pass  # it is among the effects
            elif is_users and change.before is MISSING and type(after) in (dict, list):
                raise FirstChange(_side_effect(change, self.record.where_written(change.location)))
            elif id(before) in given and not is_users and fits(after, before):
                copies.append((before, after))
            elif change.kind is HolderKind.STATE:
                raise StateMissing(str(change.location))
            elif change.kind is HolderKind.GROUP:
                raise CaptureError(
                    f"The step changes {change.location}.",
                    where=self.record.where_written(change.location),
                    remedy="Change it outside of the step.",
                )
            elif is_traced(after) and change.is_entry and not is_type_of_tracing(change.location.key):
                if after.requires_grad and after.is_leaf and id(after) not in given:
                    raise needs_gradient(str(change.location))
                stored.append(change)
            elif change.kind is not HolderKind.SCALER and not (
                change.kind is HolderKind.OPTIMIZER and change.location.key in _NOTES
            ):
                raise _side_effect(change, self.record.where_written(change.location))
        self._check_numbers(counted)
        if not settled <= self.request.settled:
            self.request.settled |= settled
            raise FirstChange(
                CaptureError(
                    "The step puts ever other values into Python objects.",
                    remedy="Keep what changes in numbers or tensors, or set it outside of the step.",
                )
            )
        return stored

    def note_writes(self) -> list[Change]:
        """Add to the effects what has become of Python's values since it was last asked; returns all that differs."""
        changes = [replace(change, after=as_scalar(change.after)) for change in self.snapshot.changes()]
        now = {change.location: change for change in changes if _is_write(change)}
        undone = [replace(change, after=change.before) for place, change in self.written.items() if place not in now]
        for change in (*now.values(), *undone):
            location = change.location
            if location not in self.written or self.written[location].after is not change.after:
                self.written[location] = change
                self.recorder.program.append(EffectWrite(location, self._output_of(change.after)))
        for change in changes:
            if self._is_growth(change):
                held, start = change.after, self.grown.get(id(change.after), len(change.before))
                self.grown[id(held)] = len(held)
                if new := held[start:]:
                    place, *others = places_of(held, self.record) or (None,)
                    extend = held.extend if others or place is None else Extend(place)
                    self.recorder.call(extend, new, is_state=True)
        return changes

    def _is_growth(self, change: Change) -> bool:
        """Whether a list has got plain values at its end, which a call can append again, and is not looked into."""
        before, after = change.before, change.after
        if type(after) is not list or after is not change.location.holder or len(before) >= len(after):
            return False
        is_same_so_far = all(map(is_same, after, before))
        new = after[len(before) :]
        parts = [id(each) for each in new if isinstance(each, dict | list)]  # in two lists, or twice, it is one object
        is_another_time = any(self.appended.setdefault(part, id(after)) != id(after) for part in parts)
        if not is_same_so_far or is_another_time or len({*parts}) < len(parts):
            return False
        if not all(map(_can_be_made_again, new)):
            return False
        return not self.record.has_looked_into(after)

    def _output_of(self, value: Any) -> Output:
        return self.recorder.host_output(value) if is_known_later(value) else Output("object", value=value)

    def _check_numbers(self, changes: list[Change]) -> None:
        """Ask for numbers that the function has changed and that are no scalars yet; see that the graph will serve."""
        if new := [change.location for change in changes if not is_scalar(change.before)]:
            raise NumbersChanged(new)
        self._check_writers(changes)
        successors: dict[int, Any] = {}
        for change in changes:
            after = change.after
            if not is_scalar(after):
                successors[change.before.of.index] = Always(after)
            elif after.is_known:
                successors[change.before.of.index] = after.of
        if successors and not self.questions.allow_again(self.numbers.values, successors):
            raise OneShot(str(self.request.numbers[min(successors)].location))

    def _check_writers(self, changes: list[Change]) -> None:
        """Trace again where another thread has written over what the step has written, or may have."""
        if taken := [place for place in self.numbers.taken if place not in self.unread]:
            raise Disturbed(taken[0])
        for change in self.snapshot.others():
            if change.location in self.unread:
                continue
            if is_scalar(change.before) and not is_scalar(change.after):  # the step may have read that as it is
                raise Disturbed(change.location)
        plain = {change.location for change in changes if not is_scalar(change.after)}
        if mixed := self.request.plain - plain:
            raise CaptureError(
                f"The step may write to {mixed.pop()}, and so did another thread while it was captured, which is lost.",
                remedy="Let threads that write where the step writes wait for its first calls.",
            )
        if others_may_write() and (new := plain - self.request.plain):
            self.request.plain |= plain
            raise Disturbed(new.pop())

    def numbers_now(self) -> list[Any]:
        """The numbers after the trace, if the graph holds for them and for everything else that there is by now."""
        if (disturbed := self.snapshot.disturbed(self.unread)) is not None:
            raise Disturbed(disturbed)
        places = [number.location for number in self.request.numbers]
        values = [place.get() for place in places]
        changed = [
            place for place, now, before in zip(places, values, self.numbers.values, strict=True) if now != before
        ]
        if changed and not (all(map(is_number, values)) and self.questions.allow(values)):
            raise Disturbed(changed[0])
        return values


def _is_write(change: Change) -> bool:
    """Return whether a call can do the change again after the replay: a plain value or number in one place."""
    if change.kind in (HolderKind.STATE, HolderKind.GROUP) or (
        change.kind is HolderKind.OPTIMIZER and change.location.key in _NOTES
    ):
        is_ours = is_number(change.before) and is_number(change.after)
    else:
        is_ours = change.kind is not HolderKind.SCALER
    after, key = change.after, change.location.key
    if is_known_later(key):
        return False
    return is_ours and change.is_entry and not is_schedulers(after) and (is_scalar(after) or isinstance(after, SCALARS))


def _can_be_made_again(value: Any) -> bool:
    """Return whether it consists of plain values and of those that are known after the graph."""
    if type(value) is dict:
        return not any(map(is_known_later, value)) and all(map(_can_be_made_again, value.values()))
    if type(value) in (list, tuple):
        return all(map(_can_be_made_again, value))
    return isinstance(value, SCALARS) or is_known_later(value)


def _is_count(change: Change) -> bool:
    """Return whether a number takes the place of another."""
    return _is_write(change) and is_number(change.before) and is_number(change.after)


def _form_of(value: Any) -> Any:
    """Return what tells one plain value from another; numbers are all alike, as the next graph is given them anew."""
    return float if is_number(value) else value if isinstance(value, SCALARS) else type(value)


def needs_gradient(name: str) -> CaptureError:
    """The refusal of a new tensor that is to be trained."""
    return CaptureError(
        f"The step puts a new tensor that requires a gradient in {name}, or in the place of one.",
        remedy="Change it in place, under torch.no_grad().",
    )


def _side_effect(change: Change, where: str) -> CaptureError:
    if change.after is MISSING:
        what = f"removes {change.location}"
    elif isinstance(change.after, Tensor):
        what = f"stores a tensor in {change.location}"
    else:
        what = f"changes {change.location}"
    return CaptureError(f"The step {what}, which a graph would not do again.", where=where, remedy=CALLBACK_REMEDY)
