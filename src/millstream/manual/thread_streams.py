"""The streams of one thread and device while scopes are open: asks ``Ordering`` what to do, and does it.

The first scope opens a session, and scopes within it share the session: so a tensor made in one group of streams
and used in another is waited for like any other. While the session is open, a mode sees every operator of the thread
(autograd's threads included: PyTorch hands modes on to them), finds the stream that it runs on, and orders it.

What the mode cannot see: kernels launched past PyTorch's dispatcher, as Triton's are. Their arguments are to be named
with ``s.wait``, or by calling them through ``s[i](...)``, ``s.run`` or ``ms.manual.parallel``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.dispatcher import find_modes, hide_operators, is_wrapper, num_modes, push_mode, remove_mode
from millstream._torch.modes.active_modes import any_autocast
from millstream.device import DeviceContext, Stream
from millstream.errors import StreamError
from millstream.manual.issuing import Issuer
from millstream.manual.operator_rules import Effect, Function, recipe_of
from millstream.manual.ordering import Ordering
from millstream.manual.scope_races import Trace
from millstream.manual.storages import PLAIN, Storages, storage_of, tensors_in

_get_ident = threading.get_ident
_grad_enabled = torch.is_grad_enabled


class ThreadStreams:
    """See the module. ``open_session`` gives one, ``leave`` ends it.

    Making one takes longer than a scope may, so a closed one is kept for the next scope that starts from the same
    stream of the same thread, with its streams, its events and what it knows of their order.

    Args:
        context: Of the device.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._driver = driver = context.driver  # asked of a closed context, too
        base = driver.current_stream()
        self.context, self.closed = context, True
        self.capturing, self.num_scopes = False, 0
        self.trace: Trace | None = None
        self._ordering = Ordering()
        self._owner = _get_ident()
        self._lock = threading.Lock()  # autograd's threads come here, too
        self._streams: list[Stream] = [base]
        self._issuer = Issuer(context, self._ordering, self._streams)
        self._storages = Storages(context, self._ordering)
        self._enter: list[Callable[[], Any]] = [driver.entry(base)]
        self._index_of = {driver.stream_id(base): 0}
        self._current = driver.current_stream_id
        self._lent: dict[int, list[int]] = {}  # by the stream that they start from: those that no scope has
        self._opaque: list[Any] = []  # results whose memory cannot be determined: kept to the end
        self._guard: Any = None
        self._ticket = 0
        self._is_whole = True  # whether another scope may have it
        self._mode = _Mode(self)

    def open(self, *, capturing: bool, check: bool) -> bool:
        """Make the device current; False where its streams are somebody else's by now."""
        if len(self._streams) > 1 and not self.context.streams.lend_again(self._streams[1:], self._ticket):
            return False
        self.closed, self.capturing = False, capturing
        self._issuer.capturing = capturing
        if not self._driver.is_current():
            self._guard = self._driver.guard()
            self._guard.__enter__()
        if check:
            self.trace = Trace(self._driver.stream_id, str(self.context.place))
            event = self.context.events.acquire()
            self.trace.start(self._streams[0], event)
            self.context.events.release(event)
        return True

    def watch(self) -> None:
        """Begin to see operators, with the first scope."""
        if self.num_scopes == 1:
            push_mode(self._mode)

    def leave(self) -> Trace | None:
        """End a scope; with the last one, the session. Return the trace then, if there is one.

        Scopes need not end in the order in which they were opened: generators may hold some.
        """
        self.num_scopes -= 1
        return None if self.num_scopes else self._close()

    def abandon(self) -> None:
        """End a scope that could not be opened."""
        self.distrust()
        self.leave()

    def distrust(self) -> None:
        """Something has interrupted a fork or join: the books may be half written, and are for no other scope."""
        self._is_whole = False

    def _close(self) -> Trace | None:
        """Stop seeing operators, and let everything go: all streams are joined."""
        self.closed = True
        is_owner = _get_ident() == self._owner
        if is_owner:
            remove_mode(self._mode)
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.stop()
        if self.context.closed:
            _abandoned.append(self)  # in a forked child nothing of the parent's may be destroyed
            return trace
        try:
            self._join_all()
            self._ticket = self.context.streams.take_back(self._streams)
            self._issuer.let_go_of_all()
            if not torch.is_inference_mode_enabled():  # whose tensors autograd never saves
                self._issuer.protect_survivors(list(self._storages.memories.values()))
            self._storages.forget_all()
            self._opaque.clear()
            if not (is_owner and self._is_whole):
                self._issuer.release_events()
        finally:
            if is_owner:  # else a generator's scope is ended by a thread whose current stream is its own affair
                self._restore()
        if is_owner and self._is_whole:
            _parked.sessions[self.context, self._driver.stream_id(self._streams[0])] = self
        return trace

    def _join_all(self) -> None:
        """Join what a generator has ended after the scope that it is in; everything, where the books are no help."""
        if self._is_whole:
            self.join(0, range(1, len(self._streams)))
        elif not self.capturing:
            for stream in self._streams[1:]:
                self.context.events.order(stream, self._streams[0])

    def _restore(self) -> None:
        """Make current what was when the session was opened."""
        if self._current() != self._driver.stream_id(self._streams[0]):
            self._enter[0]()
        if self._guard is not None:
            self._guard.__exit__()
            self._guard = None

    # --- streams

    def find(self) -> int | None:
        """The index of the stream that is current; ``None`` where it is not the session's."""
        return self._index_of.get(self._current())

    def stream(self, index: int) -> Stream:
        """The stream of that index."""
        return self._streams[index]

    def take(self, parent: int, count: int) -> list[int]:
        """Give a scope that starts from a stream so many others, the same ones each time."""
        idle = self._lent.setdefault(parent, [])
        if len(idle) < count:
            first = len(self._streams)
            self._streams += self.context.streams.lend(self._streams[parent], count - len(idle))  # returned from there
            for index, stream in enumerate(self._streams[first:], first):
                self._ordering.add_stream()
                self._enter.append(self._driver.entry(stream))
                self._index_of[self._driver.stream_id(stream)] = index
                idle.append(index)
        self._lent[parent] = idle[count:]
        return idle[:count]

    def give_back(self, parent: int, indices: list[int]) -> None:
        """Take a scope's streams back: they are joined."""
        self._lent[parent] = [*indices, *self._lent[parent]]

    def fork(self, parent: int, children: list[int]) -> None:
        """Let children start from here."""
        self._issuer.do(self._ordering.fork(parent, children))

    def come_back(self, parent: int, children: list[int]) -> None:
        """Leave the streams of a scope that ends, where a generator that is suspended on one has left it current."""
        if self.find() in children and _get_ident() == self._owner:
            self._enter[parent]()

    def join(self, parent: int, children: Sequence[int]) -> None:
        """Let the parent come after all that children have been given."""
        if self.capturing != self.context.is_capturing():
            return  # the capture has ended before the scope, and with it its events
        self._issuer.do(self._ordering.join(parent, children))

    def check_usable(self) -> None:
        """Raise a clear error where the session's streams cannot be used from here.

        Raises:
            StreamError: The scope is over, belongs to another thread or process, or a capture has begun or ended.
        """
        if self.closed:
            raise scope_is_over()
        if self.context.closed:
            raise StreamError(f"{self.context!r} cannot be used any more, nor can streams that come from it.")
        if _get_ident() != self._owner:
            raise StreamError("A scope's streams belong to the thread that opened it; open one in each thread.")
        if self.find() is None and not self.capturing and self.context.is_capturing():
            raise StreamError(
                "A CUDA graph is being captured, and this scope was opened before: its streams are not part of the "
                "capture. Open the scope within it."
            )

    # --- one call on one stream

    def call(  # noqa: PLR0912 - in every operator: each call would be one more
        self, scope: Any, index: int, function: Function, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one of PyTorch's functions on a stream of a scope.

        Where the arguments tell all that it uses, nothing watches it meanwhile.
        """
        if scope._session is None:
            raise scope_is_over()
        before = self._index_of.get(self._current())
        usable = function.is_plain and _get_ident() == self._owner and not self.context.closed
        uses = self._storages.find_plain(args, kwargs) if usable else None
        if uses is None or before is None or num_modes() != 1 or any_autocast() or self.trace is not None:
            return self.run(index, function.call, args, kwargs)
        ordering, marked = self._ordering, _grad_enabled()
        if function.writes_first:
            steps = ordering.use(index, uses[1:], uses[:1], not marked)
        else:
            steps = ordering.use(index, uses, (), not marked)
        if steps:
            self._issuer.do(steps)
        if ordering.crossings:
            self._issuer.protect(ordering.crossings, index, marked)
        if index != before:
            self._enter[index]()
        hidden = hide_operators()
        try:
            result = function.call(*args, **kwargs)
        except torch.OutOfMemoryError:
            del hidden
            self._issuer.make_room()
            hidden = hide_operators()
            result = function.call(*args, **kwargs)
        finally:
            del hidden
            if index != before:
                self._enter[before]()
        storage = storage_of(result) if type(result) is Tensor else None
        if storage is not None:
            if storage._cdata not in self._storages.memories:
                self._storages.add(storage, index)
        else:
            self._storages.add_results(result, index)
        return result

    def run(self, index: int, function: Callable[..., Any], args: Iterable[Any] = (), kwargs: Any = None) -> Any:
        """Run a function on a stream, which first waits for the tensors among its arguments."""
        kwargs = kwargs or {}
        with self.on(index):
            self.wait(index, (*args, *kwargs.values()))  # the mode cannot see all that a compiled function does
            return function(*args, **kwargs)

    def on(self, index: int) -> _On:
        """Make a stream current for a while."""
        return _On(self, index)

    def wait(self, index: int, values: Iterable[Any]) -> None:
        """Let a stream come after the last writes of all tensors in some values, and count them as read there."""
        memories = [memory for tensor in tensors_in(values) if (memory := self._storages.find(tensor)) is not None]
        if memories:
            with self._lock:
                self._issuer.use(index, memories)

    # --- what the mode sees

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of PyTorch's, after what it has to wait for."""
        recipe = recipe_of(func)
        if self.closed or recipe.effect is Effect.VIEW or self.context.closed:  # as in a forked child
            return func(*args, **kwargs)
        index = self._index_of.get(self._current())
        if index is None:
            return self._run_elsewhere(func, args, kwargs)
        with self._lock:
            reads, writes, is_opaque = self._storages.find_uses(recipe, args, kwargs)
            if is_opaque or recipe.effect is Effect.REALLOCATE:
                self._issuer.meet()
            self._issuer.use(index, reads, writes)
            if self.trace is not None:
                self.trace.launch(str(func), self._streams[index], reads, writes)
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            with self._lock:
                self._issuer.make_room()
            result = func(*args, **kwargs)
        with self._lock:
            if recipe.effect is Effect.REALLOCATE:
                for memory in writes or reads:
                    memory.home, memory.num_bytes = index, 0
            made = self._storages.add_results(result, index)
            if self.trace is not None:
                self.trace.made(made)
            if is_opaque:
                self._opaque.append(result)
                self._issuer.meet()
        return result

    def _run_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on a stream that somebody else orders; a trace tells whether they did."""
        if self.trace is None:
            return func(*args, **kwargs)
        recipe = recipe_of(func)
        with self._lock:
            reads, writes, _ = self._storages.find_uses(recipe, args, kwargs)
            self.trace.launch(str(func), self.context.current_stream(), reads, writes)
        result = func(*args, **kwargs)
        with self._lock:
            self.trace.made(self._storages.add_results(result, None))
        return result


def scope_is_over() -> StreamError:
    """The error for a scope that is used outside of its ``with``."""
    return StreamError("This scope is not open: use its streams within `with ms.streams(...) as s:` only.")


class _On:
    """Makes a stream of a session current for a while."""

    __slots__ = ("_before", "_index", "_session")

    def __init__(self, session: ThreadStreams, index: int) -> None:
        self._session, self._index = session, index

    def __enter__(self) -> None:
        session = self._session
        session.check_usable()
        # Before anything is allocated: a capture must know the stream.
        session._issuer.do(session._ordering.wake(self._index))
        self._before = session.context.current_stream()
        session._enter[self._index]()

    def __exit__(self, *_: object) -> None:
        self._session._driver.entry(self._before)()


class _Mode(TorchDispatchMode):
    """Shows a session the operators of a thread."""

    def __init__(self, session: ThreadStreams) -> None:  # pushed, never entered: PyTorch's own part is not needed
        self.session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Order an operator, and run it."""
        for kind in types:
            if kind not in PLAIN and any(type(t) is kind and is_wrapper(t) for t in tensors_in((args, kwargs))):
                return NotImplemented  # its own operators, on the tensors that it is made of, come here next
        return self.session.dispatch(func, args, kwargs or {})


def find_session(context: DeviceContext) -> ThreadStreams | None:
    """The innermost open session of this thread to which the current stream of a device belongs."""
    if not num_modes():
        return None
    for mode in find_modes():
        if isinstance(mode, _Mode):
            session = mode.session
            if session.closed:
                remove_mode(mode)  # another thread has ended its last scope, and could not
            elif session.context is context and session.find() is not None:
                return session
    return None


def open_session(context: DeviceContext, *, check: bool = False) -> ThreadStreams:
    """A session that starts from the current stream.

    Raises:
        StreamError: A capture on another device is under way.
    """
    driver = context.driver
    if not driver.is_current() and driver.is_capturing_elsewhere():
        raise StreamError(
            f"A CUDA graph is being captured on another device: work on {context.place} would not be part of it. "
            "Capture each device's graph by itself."
        )
    session = _parked.sessions.pop((context, driver.current_stream_id()), None)
    capturing = driver.is_capturing()
    if session is None or not session.open(capturing=capturing, check=check):
        session = ThreadStreams(context)
        session.open(capturing=capturing, check=check)
    return session


class _Parked(threading.local):
    """A thread's closed sessions, by context and by the identity of the stream that they start from."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[DeviceContext, int], ThreadStreams] = {}


_parked = _Parked()
_abandoned: list[ThreadStreams] = []
