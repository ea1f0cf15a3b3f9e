"""Trace a call, and again wherever something shows up late; or take the trace that an earlier process has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream._torch.distributed.fully_sharded import any_sharded
from millstream.capture.kept.traces import Shelf, open_shelf
from millstream.capture.record.location import Location
from millstream.capture.state.discover import Found, discover
from millstream.capture.step.calls import StepCall
from millstream.capture.step.capturing.bind import StepState
from millstream.capture.step.graph import StepGraph
from millstream.capture.trace.numbers.scalars import is_number
from millstream.capture.trace.outcome.changes import CALLBACK_REMEDY
from millstream.capture.trace.patches.optimizers import CountsOnDevice
from millstream.capture.trace.recorded_effects.effect_recorder import text_changed
from millstream.capture.trace.request import (
    Converted,
    Disturbed,
    FoundLate,
    NumbersChanged,
    OtherFlags,
    Request,
    Traced,
    TypesCompared,
)
from millstream.capture.trace.tracer import trace_step
from millstream.data_parallel.reducer import Reducer
from millstream.errors import CaptureError
from millstream.tree.containers import containers_in

MAX_LATE = 32
"""Objects that discovery may miss; each costs one more trace."""

MAX_DISTURBED = 3
"""Traces of one call that may be in vain as another thread has written meanwhile to what the step uses."""


@dataclass
class Retracing:
    """How one call is traced."""

    state: StepState
    call: StepCall
    counts: CountsOnDevice
    replica: Reducer | None
    dimensions: dict[int, frozenset[int]]  # by argument, those whose sizes are symbols
    like: StepGraph | None = None  # a graph that there is, to be compared with what comes out

    def record(self, found: Found) -> tuple[Request, Traced]:
        """Trace until nothing shows up late.

        Args:
            found: What the call reaches.

        Raises:
            CaptureError: The step cannot be captured, or ever more shows up.
            NoGraph: There is no graph for this call.
        """
        call, like = self.call, self.like
        roots, where, last, num_disturbed, is_plain = list(call.roots()), "", "", 0, False
        plain: set[Location] = set()
        disturbed: set[Location] = set()
        is_usual = like is None and not self.dimensions and self.replica is None and not any_sharded()
        form = call.function, call.key, call.structure, call.arguments
        shelf = open_shelf(*form, draws_by_generator=self.state.draws_by_generator) if is_usual else None
        if shelf is not None and (taken := self._take(shelf, roots, found)) is not None:
            return taken
        num_roots = len(roots)
        for _ in range(MAX_LATE):
            for _, optimizer in found.optimizers:
                self.counts.move(optimizer)
            request = self.state.make_request(call, roots, found, like)
            request.replica, request.dimensions, request.plain = self.replica, self.dimensions, plain
            request.disturbed, request.is_plain = disturbed, is_plain
            request.drawn = () if like is None else like.questions.drawn
            try:
                traced = self._trace_converting(request)
                self._leave(shelf, request, traced, roots[num_roots:])
                return request, traced
            except FoundLate as late:
                roots.append((late.name, late.value))
                where, last = late.where, late.name
                found = discover(roots)
            except NumbersChanged as changed:
                last = ", ".join(str(location) for location in changed.locations)
                self.state.note_counts(found, changed.locations)
            except TypesCompared as compared:
                if self.dimensions or any(number.location in self.state.lifted for number in request.numbers):
                    raise compared.error from None
                is_plain, self.state.compared = True, compared.error
            except OtherFlags as flags:
                self.state.note_flags(flags, like)
            except Disturbed as other:
                num_disturbed += 1
                disturbed.add(other.location)
                if num_disturbed > MAX_DISTURBED:
                    raise CaptureError(
                        f"Another thread writes to {other.location} while the step is captured.",
                        remedy="Let it wait for the first calls of the step, or pass what it writes as an argument.",
                    ) from None
                found = discover(roots)
                is_lifted = any(number.location == other.location for number in request.numbers)
                if not is_lifted and other.location.key is not None and is_number(other.location.get()):
                    self.state.note_reads(found, [other.location])
        raise CaptureError(
            f"The step meets ever more that was made outside of it, {last} last.",
            where=where,
            remedy="Make tensors arguments, or make them with PyTorch functions inside of the step.",
        )

    def _leave(self, shelf: Shelf | None, request: Request, traced: Traced, late: Sequence[tuple[str, Any]]) -> None:
        """Keep a trace for later processes, if it can be."""
        if shelf is not None:
            shelf.keep(request, traced, self.state.learned(request, late))
            self._add_to_cause(shelf)

    def _take(self, shelf: Shelf, roots: list[tuple[str, Any]], found: Found) -> tuple[Request, Traced] | None:
        """What an earlier process has traced, where all of it holds here."""
        for _, optimizer in found.optimizers:
            self.counts.move(optimizer)
        taken = None
        if (kept := shelf.find(found, lambda late: discover([*roots, *late]))) is not None:
            with self.state.learning(kept.learned) as settle:
                if kept.learned.late:
                    found = discover([*roots, *kept.learned.late])
                request = self.state.make_request(self.call, roots, found)
                if (traced := shelf.take(kept, request)) is not None:
                    settle()
                    taken = request, traced
        self._add_to_cause(shelf)
        return taken

    def _add_to_cause(self, shelf: Shelf) -> None:
        """Tell people what has come of the trace on disk."""
        if shelf.outcome and self.call.cause is not None:
            self.call.cause = replace(self.call.cause, text=f"{self.call.cause.text}; {shelf.outcome}")
            shelf.outcome = ""

    def _trace_converting(self, request: Request) -> Traced:
        """Trace; what ``float(number)`` and its like give are numbers of the graph, where it takes that and can be."""
        try:
            traced = _trace_twice(request)
            _check_given(traced, self.call)
        except Converted:
            request.converts = self.state.converts = True
            request.plain.clear()  # the numbers there may be some of the graph now
            return self._trace_converting(request)
        except CaptureError as error:  # as where C takes a plain number only
            if not request.converts:
                raise
            request.converts = self.state.converts = False
            try:
                return self._trace_converting(request)
            except CaptureError:  # which may be of what the conversions would have done
                self.state.converts = None
                raise error  # noqa: B904  with the cause that it had
        if request.converts:
            self.state.converts = True if traced.num_converted else None  # as another way may have use for it
        return traced


def _trace_twice(request: Request) -> Traced:
    """Trace; where text holds values that are known later, do so again with other stand-ins, and compare.

    Raises:
        CaptureError: They differ: the step looks at the characters.
    """
    traced = trace_step(request)
    if traced.effects.outline is not None:
        again = trace_step(replace(request, style=1))
        if again.effects.outline != traced.effects.outline:
            raise text_changed(next((call.where for call in traced.effects.calls), ""))
        traced.effects.outline = None
    return traced


def _check_given(traced: Traced, call: StepCall) -> None:
    """Refuse a step that appends to a list which is also among its arguments: there it has been given a copy."""
    given = containers_in([call.args, call.kwargs], call.opened)
    if any(id(each) in given for each in traced.effects.lists):
        raise CaptureError(
            "The step looks into a list to which it appends, which a graph would not do again.",
            where=next(call.where for call in traced.effects.calls if call.is_state),
            remedy=CALLBACK_REMEDY,
        )
