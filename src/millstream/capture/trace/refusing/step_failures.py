"""What ends a trace: the first refusal, and what is said where tracing itself fails."""

from __future__ import annotations

from typing import Any, NoReturn

from millstream.capture.lines import (
    caller_of,
    place_of,
    told,
)
from millstream.capture.record.interpreter.instructions import why_not
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.users_numbers import UsersNumbers
from millstream.capture.trace.request import (
    NotNow,
)
from millstream.errors import CaptureError


class StepFailures:
    """Of one trace.

    Args:
        questions: Asked of the step's numbers, in whose place there may be tokens in texts.
        numbers: Those.
    """

    def __init__(self, questions: Questions, numbers: UsersNumbers) -> None:
        self._questions = questions
        self._numbers = numbers
        self._first: Exception | None = None

    def note(self, error: Exception) -> None:
        """Take an error that the user's function may catch."""
        self._first = self._first or error

    def report(self, error: Exception) -> NoReturn:
        """Take an error, and raise it."""
        self.note(error)
        raise error

    def raise_first(self) -> None:
        """The first refusal counts, also when the user's function caught it and went on."""
        if self._first is not None:
            raise self._first
        if self._questions.refused:
            raise self._questions.refused[0]

    def of(self, error: Exception) -> CaptureError:
        """What is said of an error of no kind that is known."""
        if (launched := caller_of(error, "triton")) is not None:
            return CaptureError(
                "The step launches a Triton kernel of its own, which needs tensors with memory.",
                where=launched,
                remedy="Put the launch into a torch.library.custom_op with a register_fake, which is captured.",
            )
        text = f"Tracing failed: {told(error)}"
        has_number = self._questions.readable(text, self._numbers.values) != text
        instead = "use the number there, and not its text" if has_number else "keep it out of the step"
        return CaptureError(
            text,
            where=place_of(error),
            remedy=f"If the line also fails without ms.step, correct it; otherwise {instead}.",
        )

    def make_readable(self, error: BaseException | None) -> None:
        """Show numbers in the text of an error, and of its cause, where the tokens are that stand for them."""

        def shown(part: Any) -> Any:
            return self._questions.readable(part, self._numbers.values) if isinstance(part, str) else part

        while error is not None:
            error.args = tuple(map(shown, error.args))
            if isinstance(error, CaptureError):
                error.reason = shown(error.reason)
            error = error.__cause__


def not_recorded(why: str) -> Exception:
    """Return what is raised where nobody knows what a step reads.

    For good, or because of what goes on around the call.
    """
    error = CaptureError(
        f"What the step reads could not be recorded: {why}.",
        remedy="Have a C++ compiler and Python's headers (python3-dev) installed, and set no tracer within the step.",
    )
    return error if why_not() else NotNow(error)
