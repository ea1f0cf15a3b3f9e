"""What of a step runs as plain Python for good, and what people are told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.capture.lines import COMES_TO, in_library, library_in
from millstream.capture.step.calls import StepCall, code_of
from millstream.capture.step.plain.refused import Refused
from millstream.capture.step.regions.split import lines_for_a_region
from millstream.device.compiled_switches import install_later
from millstream.errors import CaptureError, warn_user, why_disabled, without_frames


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why calls of one kind run as plain Python."""

    signature: dict[str, str]  # tensors of the arguments by name, with dtype and shape
    error: CaptureError  # reason, line and remedy

    def __post_init__(self) -> None:
        without_frames(self.error)


class Refusals:
    """The refusals of one step.

    Args:
        name: Of the step.
        function: The user's.
        most: So many refusals, and no call is tried any more.

    Attributes:
        list: All there are; those of a part of a step are among those of the whole.
        disabled: Why no call is to be captured, if so.
    """

    def __init__(self, name: str, function: Callable[..., Any], most: int) -> None:
        self.list: list[Fallback] = []
        self._name = name
        self._function = function
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Try everything again."""
        self.disabled = why_disabled()
        self.list[:] = [] if self.disabled is None else [Fallback({}, self.disabled)]
        self._refused = Refused()
        self._code = code_of(self._function)

    def forget_if_edited(self) -> bool:
        """Begin again if the function has other code, as after an edit in a notebook; whether it has."""
        if code_of(self._function) is self._code:
            return False
        self.begin()
        return True

    def covers(self, key: Any) -> bool:
        """Whether calls with this key are refused."""
        return self.disabled is not None or self._refused.covers(key)

    def add_alike(self, key: Any, error: CaptureError, served: Sequence[Any]) -> bool:
        """Refuse calls with this key, and say nothing; see ``Refused``."""
        install_later()
        return self._refused.add(key, error, served)

    def add(self, call: StepCall, error: CaptureError, served: Sequence[Any], *, is_last: bool = False) -> None:
        """Refuse calls like this one, and tell of it once.

        Args:
            call: The first of them.
            error: Why.
            served: Keys of calls for which graphs were captured.
            is_last: Whether no call is to be tried any more.
        """
        is_known = self._is_known(error)
        is_hopeless = self.add_alike(call.key, error, served)
        self.list.append(Fallback(call.signature, error))
        if is_hopeless or len(self.list) > self._most or is_last:
            self.disabled = error
        if not is_known:
            warn_user(f"{self._name} runs as plain Python: {error}")

    def add_for_now(self, signature: dict[str, str], error: CaptureError) -> None:
        """Tell once why calls run as plain Python for now."""
        if not self._is_known(error):
            self.list.append(Fallback(signature, error))
            warn_user(f"{self._name} runs as plain Python for now: {error}")

    def disable(self, error: CaptureError) -> None:
        """Try no call any more."""
        self.disabled = error
        self.list.append(Fallback({}, error))
        warn_user(f"{self._name} runs as plain Python: {error}")

    def _is_known(self, error: CaptureError) -> bool:
        return any(str(error) == str(refusal.error) for refusal in self.list)


def with_region(function: Callable[..., Any], error: CaptureError) -> CaptureError:
    """The same refusal with another remedy: an eager region where that would work, or for a library's line."""
    lines, library = lines_for_a_region(function, error.where.partition(COMES_TO)[0]), library_in(error.where)
    if lines is not None:
        which = f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"
        offer = f"Or put {which} into `with ms.eager_region():`, and the rest stays captured."
    elif library:
        offer = in_library(library)
    else:
        return error
    told = type(error)(error.reason, where=error.where, remedy=f"{error.remedy} {offer}".strip())
    told.__cause__ = error.__cause__
    return told.with_traceback(error.__traceback__)
