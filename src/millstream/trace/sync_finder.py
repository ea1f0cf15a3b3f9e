"""Finds every read, copy and wait by looking at each operator: slow, so it makes no claim about times.

Operators are seen by a ``TorchDispatchMode`` of the thread that enters, and on request of threads that are started
later; where the host reads a CPU tensor without an operator (``.tolist()``, ``.cpu()``), the method is wrapped. On a
machine without a GPU they are the calls that would wait for one.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.compiler import compile_events
from millstream._torch.devices.presence import has_gpu
from millstream.insight import Recording, Site
from millstream.insight.syncs import SyncEvent, SyncFindings, SyncKind, group
from millstream.trace import frames
from millstream.trace.log import clock
from millstream.trace.notes import notes_of
from millstream.trace.watchers import Patch

_SIZES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave")
_READS = ("_local_scalar_dense", "is_nonzero", "equal", "item", "allclose", "_linalg_check_errors")
_COPIES = ("_to_copy", "copy_")
_NOT_OF_A_DEVICE = (
    "/torch/utils/data/",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_functorch/aot_autograd.py",
)
_MACHINERY = (
    "/millstream/trace/",
    "/torch/_dynamo/eval_frame.py",
    "/torch/_compile.py",
    "/torch/utils/_python_dispatch.py",
)
_HOST_SCALARS = ("_get_value",)  # an optimizer's count of steps, which is on the CPU


class _Operators(TorchDispatchMode):
    """Reports each operator that makes the host wait."""

    def __init__(self, tell: Callable[[SyncKind, int, str, bool], None]) -> None:
        super().__init__()
        self._tell = tell

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled, and are not looked into."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = clock()
        result = func(*args, **(kwargs or {}))
        kind, is_pageable = _kind_of(func, args, result)
        if kind is not None:
            self._tell(kind, clock() - start, str(func), is_pageable)
        return result


def _kind_of(function: Any, args: tuple[Any, ...], result: Any) -> tuple[SyncKind | None, bool]:
    name = function._schema.name.partition("::")[2]
    if name in _READS:
        return SyncKind.READ, False
    if name in _SIZES or (name == "index" and _has_mask(args)):
        return SyncKind.SIZE, False
    if name in ("_pin_memory", "pin_memory"):
        return SyncKind.PINNED, False
    if name in _COPIES and args and isinstance(result, torch.Tensor):
        source = args[1] if name == "copy_" and len(args) > 1 else args[0]
        if isinstance(source, torch.Tensor) and source.device.type != result.device.type:
            host = source if source.device.type == "cpu" else result
            is_pageable = host.device.type == "cpu" and not host.is_pinned()
            return (SyncKind.TO_DEVICE if host is source else SyncKind.TO_LIST), is_pageable
    return None, False


def _has_mask(args: tuple[Any, ...]) -> bool:
    masks = (torch.bool, torch.uint8)
    return len(args) > 1 and any(isinstance(each, torch.Tensor) and each.dtype in masks for each in args[1])


class SyncTrace:
    """Watches the thread that enters, until it leaves; then ``findings`` says what there was.

    Args:
        follows_threads: Watch threads that are started meanwhile, too, each to its end.
    """

    def __init__(self, *, follows_threads: bool = False) -> None:
        self._follows_threads = follows_threads
        self.findings: SyncFindings | None = None
        self._events: list[SyncEvent] = []
        self._breaks: list[tuple[int, str]] = []
        self._roots = Recording(library_roots=frames.library_roots())
        self._mode = _Operators(self._tell)
        self._num_steps = 0
        self._thread = 0
        self._would_wait = not has_gpu()

    def __enter__(self) -> SyncTrace:
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._began_unix_ns, self._began_ns = time.time_ns(), clock()
        self._watch: compile_events.CompileWatch | None = None
        self._watch_compiler()
        self._handle = register_optimizer_step_post_hook(self._on_step)
        self._patches = []
        for name in ("tolist", "cpu"):
            self._patches.append(_MethodPatch(name, self._on_read))
        if self._follows_threads:
            self._patches.append(Patch(threading.Thread, "start", self._watch_thread))
        if not self._would_wait:
            for holder, name, kind in (
                (torch.cuda, "synchronize", SyncKind.SYNCHRONIZE),
                (torch.cuda, "empty_cache", SyncKind.EMPTY_CACHE),
                (torch.cuda.Stream, "synchronize", SyncKind.SYNCHRONIZE),
                (torch.cuda.Event, "synchronize", SyncKind.SYNCHRONIZE),
            ):
                self._patches.append(Patch(holder, name, functools.partial(self._watch_call, kind)))
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        for patch in reversed(self._patches):
            patch.close()
        self._handle.remove()
        if self._watch is not None:
            self._watch.close()
        if os.getpid() != self._pid:
            return
        notes = notes_of(self._breaks, self._began_unix_ns, self._began_ns)
        self.findings = group(self._events, notes, self._num_steps, would_wait=self._would_wait)
        frames.forget()

    def _watch_compiler(self) -> None:
        if self._watch is None and compile_events.is_loaded():
            self._watch = compile_events.CompileWatch(
                lambda: None, lambda: None, lambda text: self._breaks.append((clock(), text))
            )

    def _on_step(self, *_: Any) -> None:
        self._num_steps += 1

    def _on_read(self, tensor: Any, name: str) -> None:
        if tensor.device.type == "cpu" and self._would_wait:  # elsewhere an operator copies, and is seen
            self._tell(SyncKind.TO_LIST, 0, f"Tensor.{name}", False)

    def _watch_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(thread: threading.Thread) -> None:
            run, own = thread.run, vars(thread).get("run")  # its class may have another ``run`` than Thread's

            def put_back() -> None:
                if vars(thread).get("run") is watched:
                    if own is None:
                        del thread.run
                    else:
                        thread.run = own  # type: ignore[method-assign]

            def watched() -> None:
                put_back()
                with _Operators(self._tell):
                    run()

            thread.run = watched  # type: ignore[method-assign]
            try:
                original(thread)
            except BaseException:
                put_back()
                raise

        return start

    def _watch_call(self, kind: SyncKind, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return original(*arguments, **options)
            finally:
                self._tell(kind, clock() - start, getattr(original, "__qualname__", str(kind)), False)

        return call

    def _tell(self, kind: SyncKind, took_ns: int, detail: str, is_pageable: bool) -> None:
        if os.getpid() != self._pid or not (self._follows_threads or threading.get_ident() == self._thread):
            return
        self._watch_compiler()
        stack = _without_machinery(frames.sites_of(frames.take_stack(sys._getframe(2))))
        if self._would_wait and _is_the_hosts(stack):
            return
        site = self._roots.user_site(stack)
        inside = stack[0] if stack else None
        self._events.append(
            SyncEvent(
                kind, site, inside if inside != site else None, took_ns, detail.removesuffix(".default"), is_pageable
            )
        )


def _without_machinery(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """The stack without the frames of looking itself, which are the innermost."""
    for number, site in enumerate(stack):
        if not any(part in site.file for part in _MACHINERY):
            return stack[number:]
    return ()


def _is_the_hosts(stack: tuple[Site, ...]) -> bool:
    """Return whether a value that is read would be on the CPU also where there is a GPU."""
    if any(part in site.file for site in stack for part in _NOT_OF_A_DEVICE):
        return True
    return any(site.function in _HOST_SCALARS and "/torch/optim/" in site.file for site in stack)


class _MethodPatch:
    """A method of every tensor that tells before it is called; it stands before the one that PyTorch inherits."""

    def __init__(self, name: str, tell: Callable[[Any, str], None]) -> None:
        self._name = name
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def method(tensor: Any, *arguments: Any, **options: Any) -> Any:
            tell(tensor, name)
            return original(tensor, *arguments, **options)

        self._mine, self._before = method, vars(torch.Tensor).get(name)
        setattr(torch.Tensor, name, method)

    def close(self) -> None:
        if vars(torch.Tensor).get(self._name) is not self._mine:
            return
        if self._before is None:
            delattr(torch.Tensor, self._name)
        else:
            setattr(torch.Tensor, self._name, self._before)
