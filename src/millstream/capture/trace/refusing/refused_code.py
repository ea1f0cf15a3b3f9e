"""Code of the step's that a trace cannot follow, or a graph not do again: refused before it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from millstream.capture.lines import here, stops_in_debugger
from millstream.capture.record.paths import path_of
from millstream.capture.record.reads import Read
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.impure import PROFILER, STARTED
from millstream.capture.state.relevant import counts
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.recorded_effects.effect_recorder import text_changed
from millstream.capture.trace.request import Request
from millstream.errors import CaptureError


class RefusedCode:
    """Refuses code before it runs.

    Args:
        request: What is traced.
        record: Of what the step reads.
        questions: The graph's, with the texts that have its values in them.
        report: Ends the trace by an error.
    """

    def __init__(
        self, request: Request, record: Recorder, questions: Questions, report: Callable[[Exception], NoReturn]
    ) -> None:
        self._request, self._record, self._questions, self._report = request, record, questions, report

    def asks(self, source: Any, read: Read | None) -> None:
        """Refuse a step that asks an iterator, which would give each item once."""
        name = type(source).__name__ if read is None else path_of(read, self._record)
        self._report(
            CaptureError(
                f"The step takes its data from an iterator, {name}.",
                where=here(),
                remedy="Pass the batch as an argument instead.",
            )
        )

    def on_impure(self, frame: FrameType, what: str, is_written: bool) -> None:
        """Stop before what gives something else each time, or happens outside of the process."""
        where = line_of(frame)
        if what == PROFILER:
            error = switches_profiler(where)
        elif what in STARTED:
            error = CaptureError(
                f"The step starts {what}, which a graph would not do again.",
                where=where,
                remedy="Let ms.callback do it, as in ms.callback(pool.submit, save, loss).",
            )
        elif is_written:
            error = CaptureError(
                f"The step writes to {what}, which a graph would not do again.",
                where=where,
                remedy="Let ms.callback do it, as in ms.callback(writer.writerow, [loss.item()]).",
            )
        else:
            error = CaptureError(
                f"The step reads {what}, which gives something else each time.",
                where=where,
                remedy="Read it outside of the step, and pass what depends on it as an argument.",
            )
        self._report(error)

    def has_found(self, owner: Any, function: Any) -> bool:
        """Return whether an object in C, or its function, is where the user has it, or among the arguments."""
        origins = ((each, self._record.origin_of(each)) for each in (owner, function))
        found = (each for value, each in origins if each is not None and each.holder is not value)
        is_given = any(value is owner for _, value in self._request.roots)
        return is_given or any(counts(each, self._record) and self._record.was_before(each) for each in found)

    def on_opaque(self, frame: FrameType, function: Any, owner: Any) -> None:
        """Stop before a function of an object in C that nobody can compare."""
        origin = self._record.origin_of(owner)
        name = type(owner).__name__ if origin is None else path_of(origin, self._record)
        what, kind = f"{name}.{function.__name__}()", type(owner).__name__
        self._report(
            CaptureError(
                f"The step calls {what}, and nobody can compare what that {kind} holds.",
                where=line_of(frame),
                remedy="Call it outside of the step, take a lock by with, or let ms.callback do it, as in "
                "ms.callback(digest.update, data).",
            )
        )

    def on_extension(self, frame: FrameType, function: Any) -> None:
        """Stop before an extension module that is given a tensor."""
        self._report(
            CaptureError(
                f"The step calls {function.__name__}(), C++ code that may use a tensor's memory past operators.",
                where=line_of(frame),
                remedy="Put the call into a torch.library.custom_op with a register_fake, which is captured.",
            )
        )

    def on_text(self, frame: FrameType) -> None:
        """Stop before code that may take text apart in which values of the graph are."""
        if self._questions.texts.made:
            self._report(text_changed(line_of(frame)))

    def on_debugger(self, frame: FrameType) -> None:
        """Stop before a debugger does."""
        self._report(stops_in_debugger(line_of(frame)))


def switches_profiler(where: str = "") -> CaptureError:
    """Return what is raised where a profiler is started or stopped."""
    return CaptureError(
        "The step starts or stops a profiler, which a graph would not do again.",
        where=where,
        remedy="Start and stop it outside of the step.",
    )


def line_of(frame: FrameType) -> str:
    """The line that a frame is at."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
