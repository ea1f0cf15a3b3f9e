"""``ms.streams``: concurrency that its author writes down."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from millstream._torch.dispatcher import is_being_traced
from millstream.device import MAX_STREAMS, DeviceContext, Place, Stream, context
from millstream.errors import ArgumentError, StreamError
from millstream.manual.hints import HintedScope
from millstream.manual.operator_rules import Functions, find_function, look_up
from millstream.manual.thread_streams import ThreadStreams, find_session, open_session, scope_is_over

P = ParamSpec("P")
R = TypeVar("R")
Device: TypeAlias = DeviceContext | Place | torch.device | str | int | None


def streams(num_streams: int, device: Device = None, *, check: bool = False) -> Scope | SerialScope | HintedScope:
    """Fork several streams from the current one, and join them at the end of the ``with``, also where it raises.

    ``s[0]`` is the stream that was current, and where everything runs that names no stream; ``s[1]`` and so on run
    beside it. ``s[1].mm(a, b)`` runs one function of ``torch.nn.functional`` or ``torch`` there, ``with s[1]:`` a
    block, ``s.run([f, g])`` functions beside each other. A number beyond the last begins again at the first. Whatever
    is used on another stream than it was made on is waited for, and lives until that stream is done with it. A scope
    within a scope takes streams of its own, as many as it says, and starts from the stream that it is opened on.

    >>> with ms.streams(2) as s:
    ...     left = s[0].mm(a, b)
    ...     right = s[1].mm(a, c)
    ...     both = left + right  # on the caller's stream, after both

    On the CPU, with one stream, under ``MILLSTREAM_ENGINE=serial``, the same code runs in program order. In what
    ``ms.step`` and ``ms.compile`` capture, the streams are hints for the schedule.

    Args:
        num_streams: How many, the current one included.
        device: Where; by default the current CUDA device, or the CPU where there is none.
        check: Also watch streams that are none of the scope's, and raise ``StreamError`` at the end where work on them
            is not ordered. Slow.

    Raises:
        ArgumentError: ``num_streams`` is no number of streams.
        DeviceError: The device does not exist, or its streams are all in use.
        StreamError: The fork is not possible here.
    """
    if num_streams == 1:
        return SerialScope(1)
    if type(num_streams) is not int or not 1 <= num_streams <= MAX_STREAMS:
        raise ArgumentError(f"streams({num_streams!r}) is no number of streams; give 1 to {MAX_STREAMS}.")
    if is_being_traced():
        return HintedScope(num_streams)
    if os.environ.get("MILLSTREAM_ENGINE") == "serial":
        return SerialScope(num_streams)
    found = find_context(device)
    return SerialScope(num_streams) if found.place.kind == "cpu" else Scope(num_streams, found, check=check)


def find_context(device: Device) -> DeviceContext:
    """The context of a device; by default that of the current CUDA device, or of the CPU where there is none."""
    if isinstance(device, DeviceContext):
        return device
    found = _found.get(device)
    if found is not None and not found.closed:
        return found
    if device is None:
        return find_context("cuda" if torch.cuda.is_initialized() or torch.cuda.is_available() else "cpu")
    found = context(device)
    if str(device) != "cuda":  # which is the device that is current
        _found[device] = found
    return found


_found: dict[Device, DeviceContext] = {}  # to look a device up takes longer than to fork


class Scope(AbstractContextManager["Scope"]):
    """Several streams of one device; made by ``streams``.

    Attributes:
        num_streams: How many.
    """

    __slots__ = ("_context", "_handles", "_indices", "_session", "check", "num_streams")

    def __init__(self, num_streams: int, context: DeviceContext, *, check: bool = False) -> None:
        self.num_streams, self.check = num_streams, check
        self._context = context
        self._session: ThreadStreams | None = None
        self._handles: list[StreamHandle | None] = []
        self._indices: list[int] = []

    def __enter__(self) -> Scope:
        if self._indices:
            raise StreamError("A scope can be entered once; call ms.streams again.")
        session = find_session(self._context)
        if self.check and session is not None:
            raise ArgumentError("check=True is for the outermost scope: it then covers the scopes within it, too.")
        if session is None:
            session = open_session(self._context, check=self.check)
        session.num_scopes += 1
        try:
            session.watch()
            parent = session.find()
            assert parent is not None, "the session is of the stream that is current"
            others = session.take(parent, self.num_streams - 1)
            session.fork(parent, others)
        except BaseException:  # KeyboardInterrupt is one
            session.abandon()
            raise
        self._session, self._indices = session, [parent, *others]
        self._handles = [None] * self.num_streams
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        session, self._session = self._session, None
        assert session is not None, "it was entered"
        self._handles = []  # they refer to the scope
        parent, *others = self._indices
        trace = None
        try:
            if not session.context.closed:
                session.come_back(parent, others)
                session.join(parent, others)
                session.give_back(parent, others)
        except BaseException:
            session.distrust()
            raise
        finally:
            trace = session.leave()
        if kind is None and trace is not None and (races := trace.describe_races()):
            raise StreamError(f"Work on streams of this scope is not ordered.\n{races}")

    def __len__(self) -> int:
        return self.num_streams

    def __getitem__(self, index: int) -> StreamHandle:
        if self._session is None:
            raise scope_is_over()
        if type(index) is not int or index < 0:
            _bad_index(index)
        position = index % self.num_streams
        handle = self._handles[position]
        if handle is None:
            handle = self._handles[position] = StreamHandle(self, self._session, self._indices[position])
        return handle

    def run(self, branches: Iterable[Callable[[], R]]) -> list[R]:
        """Call functions without arguments, the first on stream 0, the next on stream 1 and so on; return the results.

        What a function raises is raised here, once, when the earlier ones are issued; later ones are not called.
        """
        return [_run_branch(self[position], position, branch) for position, branch in enumerate(branches)]

    def join(self) -> None:
        """Let the caller's stream come after all that was given to the scope's so far."""
        if self._session is None:
            raise scope_is_over()
        self._session.check_usable()
        self._session.join(self._indices[0], self._indices[1:])
        self._session.fork(self._indices[0], self._indices[1:])

    def wait(self, *tensors: Any) -> None:
        """Let the current stream come after whatever wrote tensors last.

        Only needed where a kernel is launched past PyTorch's dispatcher, as by Triton.
        """
        if self._session is None:
            raise scope_is_over()
        self._session.check_usable()
        index = self._session.find()
        if index is None:
            raise StreamError("The current stream is none of this scope's: it must wait by events of its own.")
        self._session.wait(index, tensors)


class StreamHandle(Functions):
    """One stream of a scope: ``with s[1]:``, ``s[1].mm(a, b)``, ``s[1](function, a, b)``.

    Its attributes are the functions of ``torch.nn.functional`` and ``torch``.
    """

    def __init__(self, scope: Scope, session: ThreadStreams, index: int) -> None:
        self._scope, self._session, self._index = scope, session, index
        self._on: list[AbstractContextManager[None]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = functools.partial(self._session.call, self._scope, self._index, find_function(name))
        self.__dict__[name] = call  # looked up once in a scope
        return call

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any function on this stream, which first waits for the tensors among its arguments."""
        if self._scope._session is None:
            raise scope_is_over()
        return self._session.run(self._index, function, args, kwargs)

    def __enter__(self) -> StreamHandle:
        if self._scope._session is None:
            raise scope_is_over()
        on = self._session.on(self._index)
        on.__enter__()
        self._on.append(on)
        return self

    def __exit__(self, *details: Any) -> None:
        on = self._on.pop()
        if self._scope._session is not None:  # else a generator ends late, and the scope has restored the stream
            on.__exit__(*details)

    @property
    def stream(self) -> Stream:
        """The stream itself, as PyTorch has it."""
        return self._session.stream(self._index)


class SerialScope(AbstractContextManager["SerialScope"]):
    """A stand-in for ``streams`` where there is one stream: everything runs as it is written.

    Attributes:
        num_streams: How many were asked for.
    """

    __slots__ = ("_is_open", "num_streams")

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self._is_open = False

    def __enter__(self) -> SerialScope:
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False

    def __len__(self) -> int:
        return self.num_streams

    def __getitem__(self, index: int) -> SerialHandle:
        if not self._is_open:
            raise scope_is_over()
        if type(index) is not int or index < 0:
            _bad_index(index)
        return _HERE

    def run(self, branches: Iterable[Callable[[], R]]) -> list[R]:
        """Call functions one after another; return the results."""
        return [_run_branch(self[position], position, branch) for position, branch in enumerate(branches)]

    def join(self) -> None:
        """Do nothing: all is in order."""
        if not self._is_open:
            raise scope_is_over()

    def wait(self, *tensors: Any) -> None:  # noqa: ARG002
        """Do nothing: all is in order."""
        if not self._is_open:
            raise scope_is_over()


class SerialHandle(Functions):
    """The only stream there is."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return look_up(name)

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function."""
        return function(*args, **kwargs)

    def __enter__(self) -> SerialHandle:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def stream(self) -> None:
        """None: nothing is switched."""
        return


_HERE = SerialHandle()


def _run_branch(handle: Any, position: int, branch: Callable[[], Any]) -> Any:
    if not callable(branch):
        raise ArgumentError(f"Branch {position} is {branch!r}, which cannot be called.")
    try:
        return handle(branch)
    except Exception as error:
        error.add_note(f"Raised in branch {position}.")
        raise


def _bad_index(index: Any) -> int:
    raise ArgumentError(f"Streams have numbers, from 0; {index!r} is none.")
