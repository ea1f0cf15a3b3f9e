"""Window B: a few steps under torch.profiler with Python's stacks, for lines alone; its times are stretched.

For each call of the driver: the lines that led to it, and the module. Work of a backward pass has the lines of the
forward operator with the same sequence number. Python 3.12.0 to 3.12.4 do not tell of calls of C functions
(pytorch#155446): what such a function launches has the line of the next call outwards there, or none.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from millstream.insight import Site
from millstream.insight.profiler.kineto import DeviceTrace
from millstream.insight.records import HostSpan, LaunchCall, Stack

_PYTHON = ("_ExtraFields_PyCall", "_ExtraFields_PyCCall")
_OPERATOR = "_ExtraFields_TorchOp"


@dataclass
class _Frame:
    """A call, of a function or an operator, and what it called."""

    start_ns: int
    end_ns: int
    caller: Site | None = None  # the line that called it; None of an operator
    is_outermost: bool = False  # nothing is known to have called it
    module: int = 0  # address of the module that it is a call of
    sequence: int = -1
    parent: _Frame | None = None
    children: list[_Frame] = field(default_factory=list)

    def path(self) -> list[_Frame]:
        """From here outwards."""
        found, frame = [], self
        while frame is not None:
            found.append(frame)
            frame = frame.parent  # type: ignore[assignment]
        return found


class CallStacks:
    """The Python stacks of the window, by thread.

    Args:
        tree: What ``experimental_event_tree`` gave.
        trace: The same run as ``export_chrome_trace`` wrote it: it has the system's numbers of threads.
        folders: ``sys.path`` at the time: the profiler leaves it out of the names of files.
    """

    def __init__(self, tree: list[Any], trace: Mapping[str, Any], folders: Sequence[str]) -> None:
        self._roots: dict[int, list[_Frame]] = {}
        self._forward: dict[int, _Frame] = {}  # by sequence number
        self._names = _module_names()
        self._folders = tuple(folders)
        self._thread_of: dict[int, int] = {}  # by the system's number of a thread: the profiler's
        base_ns = int(trace.get("baseTimeNanoseconds", 0))
        threads = {
            (event["name"], base_ns + round(float(event["ts"]) * 1000)): int(event["tid"])
            for event in trace.get("traceEvents", ())
            if event.get("cat") == "cpu_op"
        }
        pending: list[tuple[Any, _Frame | None]] = [(event, None) for event in tree]
        num_python: dict[int, int] = {}
        while pending:
            event, parent = pending.pop()
            kind = type(event.extra_fields).__name__
            frame = parent
            if kind in _PYTHON or kind == _OPERATOR:
                frame = self._frame_of(event, kind, parent)
                siblings = parent.children if parent is not None else self._roots.setdefault(event.start_tid, [])
                siblings.append(frame)
                if kind == _OPERATOR:
                    self._note_operator(event, frame, threads)
                else:
                    num_python[event.start_tid] = num_python.get(event.start_tid, 0) + 1
            pending += [(child, frame) for child in event.children]
        for frames in self._roots.values():
            _sort(frames)
        self._main = max(num_python, key=num_python.__getitem__, default=0)

    def _note_operator(self, event: Any, frame: _Frame, threads: Mapping[tuple[str, int], int]) -> None:
        system = threads.get((event.name, event.start_time_ns))
        if system is not None:
            self._thread_of[system] = event.start_tid
        is_backward = "Backward" in event.name or event.name.startswith("autograd::engine")
        if frame.sequence >= 0 and not is_backward:
            known = self._forward.get(frame.sequence)
            if known is None or frame.start_ns < known.start_ns:
                self._forward[frame.sequence] = frame

    def at(self, thread: int, now_ns: int) -> tuple[Stack, str]:
        """The lines, innermost first, and the module, at a moment in a thread of the system's number."""
        frame = self._innermost(self._thread_at(thread, now_ns), now_ns)
        path = frame.path() if frame is not None else []
        backward = next((each for each in path if each.sequence >= 0), None)
        if backward is not None and not any(each.module for each in path):
            forward = self._forward.get(backward.sequence)
            if forward is not None and forward is not backward and forward.start_ns < backward.start_ns:
                path = forward.path()
        if not any(each.caller for each in path):
            frame = self._innermost(self._main, now_ns)
            path = frame.path() if frame is not None else []
        return _stack_of(path), self._module_of(path)

    def _thread_at(self, thread: int, now_ns: int) -> int:
        """The profiler's number of a thread. Autograd's has another one in CUPTI: that one runs an operator then."""
        known = self._thread_of.get(thread)
        if known is not None:
            return known
        for each in self._roots:
            frame = self._innermost(each, now_ns) if each != self._main else None
            if frame is not None and frame.caller is None:
                return each
        return self._main

    def add_to(self, trace: DeviceTrace) -> DeviceTrace:
        """The trace with lines and modules of each call of the driver."""

        def of_launch(call: LaunchCall) -> LaunchCall:
            stack, module = self.at(call.thread, call.start_ns)
            return replace(call, stack=stack, module=module)

        def of_span(span: HostSpan) -> HostSpan:
            return replace(span, stack=self.at(span.thread, span.start_ns)[0])

        return replace(trace, launches=tuple(map(of_launch, trace.launches)), spans=tuple(map(of_span, trace.spans)))

    def _innermost(self, thread: int, now_ns: int) -> _Frame | None:
        found, frames = None, self._roots.get(thread, [])
        while frames:
            at = bisect.bisect_right(frames, now_ns, key=lambda frame: frame.start_ns) - 1
            if at < 0 or frames[at].end_ns < now_ns:
                break
            found = frames[at]
            frames = found.children
        return found

    def _frame_of(self, event: Any, kind: str, parent: _Frame | None) -> _Frame:
        fields = event.extra_fields
        frame = _Frame(event.start_time_ns, event.end_time_ns, parent=parent)
        if kind == _OPERATOR:
            frame.sequence = fields.sequence_number
            return frame
        frame.caller = _site_of(fields.caller, self._folders)
        if kind == _PYTHON[0]:
            own = _site_of(fields.callsite, self._folders)
            frame.is_outermost = parent is None and own == replace(frame.caller, line=own.line)
            frame.module = int(fields.module.self_ptr) if fields.module is not None else 0
        return frame

    def _module_of(self, path: list[_Frame]) -> str:
        addresses = [each.module for each in path if each.module]
        names = [self._names.get((outer, inner), "") for inner, outer in pairwise(addresses)]
        return ".".join(name for name in reversed(names) if name)


def _sort(frames: list[_Frame]) -> None:
    pending = [frames]
    while pending:
        siblings = pending.pop()
        siblings.sort(key=lambda frame: frame.start_ns)
        pending += [frame.children for frame in siblings if frame.children]


def _stack_of(path: list[_Frame]) -> Stack:
    """The lines of calls. Where a function itself stands is not known, and its first line would be a wrong one."""
    return tuple(each.caller for each in path if each.caller is not None and not each.is_outermost)


def _site_of(place: Any, folders: tuple[str, ...]) -> Site:
    return Site(_full_path(place.file_name, folders), place.line_number, place.function_name)


@cache
def _full_path(name: str, folders: tuple[str, ...]) -> str:
    """The profiler leaves out folders of ``sys.path``."""
    if Path(name).is_absolute() or name.startswith("<"):
        return name
    return next((str(path) for folder in folders if (path := Path(folder, name)).is_file()), name)


def _module_names() -> dict[tuple[int, int], str]:
    """By addresses of two modules: the path from the first to the second."""
    # What an object says of its class is asked of nobody: some warn, and proxies of what is gone raise.
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    return {
        (id(outer), id(inner)): name
        for outer in modules
        for name, inner in outer.named_modules(remove_duplicate=False)
        if name
    }


def forget() -> None:
    """Let go of paths that were looked up."""
    _full_path.cache_clear()
