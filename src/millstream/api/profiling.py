"""``ms.profile``: why the device idles while some code runs, with the line and what mending it would give."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from millstream.capture.step.capturing.captures import Captures
from millstream.capture.step.step import Step
from millstream.data.feeding import _Pass
from millstream.data_parallel.agreement import Agreement
from millstream.data_parallel.exchange import Exchange
from millstream.errors import ArgumentError, check_folder
from millstream.insight import Findings, analyse
from millstream.insight.syncs import SyncFindings
from millstream.report.idle import sync_list, to_page, to_picture, to_text, to_trace
from millstream.trace import ProfiledRun, SyncTrace

P = ParamSpec("P")
R = TypeVar("R")


_OWN = (
    ((_Pass, "__next__"),),
    ((Step, "__call__"),),
    ((Captures, "capture"),),
    ((Exchange, "finish"), (Agreement, "gather")),
)
"""Where Millstream itself waits for data, steps, compiles, and waits for other processes."""


class Profile:
    """The result of ``with ms.profile() as p:``; read it after the ``with``.

    Attributes:
        findings: Causes, lines and the diagnosis as data; ``None`` until the ``with`` is left.
    """

    def __init__(self, script: str = "", *, uses_device: bool = True) -> None:
        self.findings: Findings | None = None
        self._session = ProfiledRun(script, *_OWN, uses_device=uses_device)

    def __enter__(self) -> Profile:
        self._session.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._session.is_inherited:  # a forked child has nothing to report
            self.findings = analyse(self._session.stop())

    def step(self) -> None:
        """A step is over: for loops without an optimizer, such as a server's. Then steps are from call to call."""
        self._session.mark_step()

    def __str__(self) -> str:
        return to_text(self._known())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, fit for JSON."""
        return self._known().to_dict()

    def save(self, path: str | Path) -> None:
        """Write the report into a file.

        Args:
            path: Its suffix chooses the form: ``.html`` (one page, opens anywhere), ``.svg`` (a picture), ``.json``
                (data, to be compared), or ``.trace.json`` (for ui.perfetto.dev).

        Raises:
            ArgumentError: The suffix is another one, or the folder is not there.
        """
        path, found = Path(path), self._known()
        check_writable(path)
        path.write_text(_writer_for(path)(found), encoding="utf-8")

    def _known(self) -> Findings:
        if self.findings is None:
            raise ArgumentError("The profile is not over: read it after the with block.")
        return self.findings


def _to_json(found: Findings) -> str:
    return json.dumps(found.to_dict(), indent=2) + "\n"


def _writer_for(path: Path) -> Callable[[Findings], str]:
    name = path.name.lower()
    for suffix, write in ((".html", to_page), (".svg", to_picture), (".trace.json", to_trace), (".json", _to_json)):
        if name.endswith(suffix):
            return write
    raise ArgumentError(
        f"cannot write a profile into {str(path)!r}: its name must end with .html, .svg, .json or .trace.json"
    )


def check_writable(path: str | Path) -> None:
    """Raise ``ArgumentError`` where a report cannot go, before a long run."""
    _writer_for(Path(path))
    check_folder(Path(path))


@overload
def profile(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def profile(function: None = None, *, save: str | Path | None = None) -> Profile: ...
def profile(function: Callable[P, R] | None = None, *, save: str | Path | None = None) -> Callable[P, R] | Profile:
    """Say why the device idles while some code runs: each cause with your line, its time, and what mending it gives.

    As a context manager, or on a function, whose report is printed to the standard error output after each call::

        with ms.profile() as p:
            train()
        print(p)
        p.save("why.html")


        @ms.profile
        def train(): ...

    From the command line, of any script: ``millstream profile train.py``. A profile within another one, as in a script
    under that command, reports its own time; on a GPU, the outer one alone has the device's side. Without a GPU, the
    device is the CPU itself: what does not compute is idle. The code that runs is not changed: its results and random
    numbers are the same.

    Args:
        function: What to profile, where it is used as a decorator.
        save: A file to write the report into, as ``Profile.save`` does.

    Raises:
        ArgumentError: ``save`` has another suffix.
    """
    if save is not None:
        check_writable(save)
    if function is None:
        return _Saved(save) if save is not None else Profile()

    @functools.wraps(function)
    def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
        run = Profile(getattr(function, "__qualname__", "function"))
        try:
            with run:
                return function(*args, **kwargs)
        finally:
            if run.findings is not None:
                sys.stderr.write(f"{run}\n")

    return profiled


class trace_syncs:  # noqa: N801 - reads as a function does: with ms.trace_syncs() as t
    """List what makes the host wait for the device while some code runs: which line, how often, what to write instead.

    Reads of values (``.item()``, ``if t:``, ``print(t)``), of tensors (``.cpu()``, ``.tolist()``), masks as indices,
    copies, pinned allocations, ``synchronize``, graph breaks and recompilations, in the thread that enters::

        with ms.trace_syncs() as t:
            train(steps=5)
        print(t)

    Every operator is looked at, which is slow: times are only those of the calls found. Without a GPU, the calls are
    listed that would wait for one. From the command line: ``millstream syncs train.py``.
    """

    def __init__(self) -> None:
        self._trace = SyncTrace()

    def __enter__(self) -> trace_syncs:
        self._trace.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trace.__exit__(kind, error, traceback)

    @property
    def findings(self) -> SyncFindings | None:
        """The list as data; ``None`` until the ``with`` is left."""
        return self._trace.findings

    def __str__(self) -> str:
        return sync_list.to_text(self._known())

    def to_dict(self) -> dict[str, Any]:
        """The list as plain data, fit for JSON."""
        return sync_list.to_dict(self._known())

    def _known(self) -> SyncFindings:
        if self.findings is None:
            raise ArgumentError("The trace is not over: read it after the with block.")
        return self.findings


class _Saved(Profile):
    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self.findings is not None:
            self.save(self._path)
