"""Parts of PyTorch that are others for one thread, and as they were for all others. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class OneThreads:
    """A flag of PyTorch's whole process that has one value for the thread that sets it and another for all others.

    Code that keeps it after the context has ended, to restore what was there, keeps what was there before.

    Args:
        inside: For this thread.
        outside: For other threads, and for all of them in the end.
    """

    def __init__(self, inside: bool, outside: Any) -> None:
        self._inside, self._outside = inside, outside
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return self._inside if threading.get_ident() == self._thread else bool(self._outside)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __or__(self, other: bool) -> bool:  # as transformers' ``is_tracing |= …`` does with the flag
        return bool(self) | other

    def __and__(self, other: bool) -> bool:
        return bool(self) & other

    def __xor__(self, other: bool) -> bool:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __repr__(self) -> str:
        return repr(bool(self))

    def end(self) -> None:
        """Be the same for all threads from now on."""
        self._thread = None


@contextlib.contextmanager
def flagged(owner: Any, name: str, value: bool) -> Iterator[None]:
    """Give a flag of PyTorch's another value for this thread."""
    before = getattr(owner, name)
    if before is value:  # guards of models that other threads have compiled take no other object for it
        yield
        return
    flag = OneThreads(value, before)
    setattr(owner, name, flag)
    try:
        yield
    finally:
        flag.end()
        setattr(owner, name, before)


def leave_to_python(function: Any) -> None:
    """Have Dynamo pass over calls of a function, also where another thread's compiled code comes to one."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class, or one that code of its module calls, for calls from this thread.

    Those from others go to the original. Where they look for it they find another object than that, though, which
    guards of compiled models notice: for what such models may use there is ``attributes_here``.
    """
    raw, original = vars(owner)[name], getattr(owner, name)
    thread = threading.get_ident()

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    leave_to_python(choose)
    setattr(owner, name, staticmethod(choose) if isinstance(raw, classmethod | staticmethod) else choose)
    try:
        yield
    finally:
        setattr(owner, name, raw)


class _Here:
    """An attribute of a module that is another for one thread; that in the module's dictionary is for all others."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value
        self._thread = threading.get_ident()

    def __get__(self, module: Any, _: type) -> Any:
        return self._value if threading.get_ident() == self._thread else vars(module)[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value


@contextlib.contextmanager
def attributes_here(module: ModuleType, **values: Any) -> Iterator[None]:
    """For the length of the context, give attributes of a module these values where this thread asks for them.

    The module's dictionary stays as it is, and with it what its own code finds, and guards of compiled models do.
    """
    leave_to_python(_Here.__get__)
    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: _Here(name, value) for name, value in values.items()})
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def reads_seen(kind: Any, on_read: Callable[[Any, str, FrameType], None]) -> Iterator[None]:
    """For the length of the context, see which attributes of objects of a class this thread reads, or seeks in vain.

    The class has a ``__getattribute__`` of its own meanwhile, and so must not have one before.

    Args:
        kind: The class.
        on_read: Called with the object, the name and the frame that reads, before it does; may raise an error there.
    """
    thread = threading.get_ident()

    def read(owner: Any, name: str) -> Any:
        if threading.get_ident() == thread:
            on_read(owner, name, sys._getframe(1))
        return object.__getattribute__(owner, name)

    leave_to_python(read)
    kind.__getattribute__ = read
    try:
        yield
    finally:
        del kind.__getattribute__
