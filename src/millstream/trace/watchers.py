"""Watchers of a whole run: loaders, optimizers, the collector, compilations, checkpoints.

Each hook costs a microsecond or two when its event happens, and nothing otherwise. Nothing is drawn from any generator
of random numbers. ``close`` puts back what was there, unless somebody has put something else there meanwhile.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from millstream._torch import loading
from millstream._torch.compiler import compile_events
from millstream._torch.devices.presence import has_gpu
from millstream.insight import Cause, Loader, Site
from millstream.trace import workers
from millstream.trace.log import FIRST_BATCH, Log, clock

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter",),
)
"""Of ``torch.distributed``, as the user calls them; those of DistributedDataParallel are seen on a GPU only."""
COLLECT_NS = 200
"""To find an object of a cycle that nobody refers to, and to free it: 75 to 290 ns were measured with Python 3.11.
However rarely the collector runs, somebody has to."""


class Patch:
    """A wrapper in the place of a function of a class or module, until it is closed."""

    def __init__(self, holder: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._holder, self._name = holder, name
        self._before = vars(holder)[name]
        self._mine = functools.wraps(self._before)(wrap(self._before))
        setattr(holder, name, self._mine)

    def close(self) -> None:
        """Put back what was there."""
        if vars(self._holder).get(self._name) is self._mine:
            setattr(self._holder, self._name, self._before)


class Hooks:
    """All that is watched during a run.

    Args:
        log: Where to write it down.
        waiters: Other functions in which a loop waits for data: class and name.
        steppers: Functions that are a whole step: class and name.
        compilers: Functions that compile, besides TorchDynamo: class and name.
        exchangers: Functions that wait for other processes, besides ``torch.distributed``'s: class and name. What they
            wait with has a ``label``.
    """

    def __init__(
        self,
        log: Log,
        waiters: tuple[tuple[type, str], ...] = (),
        steppers: tuple[tuple[type, str], ...] = (),
        compilers: tuple[tuple[type, str], ...] = (),
        exchangers: tuple[tuple[type, str], ...] = (),
    ) -> None:
        self._log = log
        self._pid = os.getpid()
        self.worker_times = workers.WorkerTimes()
        self._patches = [Patch(*loading.NEXT, self._watch_next)]
        self._patches.append(Patch(*loading.START, functools.partial(self._watch_call, Cause.PASS, "")))
        self._patches += [Patch(*place, self._watch_wait) for place in waiters]
        self._patches += [Patch(*place, self._watch_step) for place in steppers]
        self._patches += [Patch(*place, self._watch_compiler) for place in compilers]
        self._patches += [Patch(*place, self._watch_exchange) for place in exchangers]
        self._patches += [Patch(*place, self._watch_fetch) for place in loading.FETCHES]
        self._patches.append(Patch(torch, "save", functools.partial(self._watch_call, Cause.IO, "torch.save")))
        if has_gpu():
            for name, cause in (("synchronize", Cause.SYNC), ("empty_cache", Cause.ALLOCATOR)):
                watch = functools.partial(self._watch_call, cause, f"torch.cuda.{name}")
                self._patches.append(Patch(torch.cuda, name, watch))
        if torch.distributed.is_available():
            for name in filter(vars(torch.distributed).__contains__, COLLECTIVES):
                watch = functools.partial(self._watch_collective, name)
                self._patches.append(Patch(torch.distributed, name, watch))
        self._handle = register_optimizer_step_post_hook(self._on_step)
        self.on_step: Callable[[object], None] | None = None
        self.on_batch: Callable[[], None] | None = None
        self._collecting: tuple[int, int] | None = None
        gc.callbacks.append(self._on_collection)
        self._compiles: compile_events.CompileWatch | None = None
        self._compiling: dict[int, int] = {}
        self.num_compiles = 0
        self.watch_compiler()

    def watch_compiler(self) -> None:
        """Watch compilations from now on, if the compiler has been imported."""
        if self._compiles is None and compile_events.is_loaded():
            self._compiles = compile_events.CompileWatch(self._on_compile, self._on_compiled, self._on_break)

    def close(self) -> None:
        """Watch nothing any more."""
        for patch in reversed(self._patches):
            patch.close()
        self._handle.remove()
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        if self._compiles is not None:
            self._compiles.close()

    # --- what they see -----------------------------------------------------------------------------------------------

    def _watch_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        log, pid = self._log, self._pid
        known: weakref.WeakKeyDictionary[Any, tuple[Site | None, int]] = weakref.WeakKeyDictionary()

        def get_batch(iterator: Any) -> Any:
            if os.getpid() != pid:
                return original(iterator)
            start, ran, cause, detail = clock(), time.thread_time_ns(), Cause.PASS, ""
            try:
                batch = original(iterator)
                cause, detail = (Cause.DATA_WAIT, "") if iterator in known else (Cause.PASS, FIRST_BATCH)
            finally:  # the end of a pass takes time, and is no batch
                if loading.makes_in_process(iterator):
                    cause, detail = Cause.IN_PROCESS, ""
                    log.ran_for_batch_ns.append(time.thread_time_ns() - ran)
                log.add_span(start, cause, detail)
            self._tell_of_batch()
            if iterator not in known:
                known[iterator] = self._note_loader(iterator)
            log.num_batches[known[iterator]] += 1
            return batch

        return get_batch

    def _tell_of_batch(self) -> None:
        self._log.add_batch()
        if self.on_batch is not None:
            self.on_batch()

    def _watch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(stepper: Any, *arguments: Any, **options: Any) -> Any:
            result = original(stepper, *arguments, **options)
            self._on_step(stepper)
            return result

        return step

    def _watch_compiler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = self._watch_call(Cause.COMPILE, "ms.step", original, depth=3)

        def compile_step(*arguments: Any, **options: Any) -> Any:
            self.num_compiles += 1
            return watched(*arguments, **options)

        return compile_step

    def _note_loader(self, iterator: Any) -> tuple[Site | None, int]:
        maker = loading.item_maker(iterator)
        site = None
        if maker is not None:
            code = maker.__code__
            site = Site(code.co_filename, code.co_firstlineno, code.co_name)
        key = site, loading.workers_of(iterator)
        self._log.loaders.setdefault(key, Loader(key[1], site=site))
        return key

    def _watch_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        log, pid = self._log, self._pid

        def wait(*arguments: Any, **options: Any) -> Any:
            if os.getpid() != pid:
                return original(*arguments, **options)
            start = clock()
            try:
                result = original(*arguments, **options)
            finally:
                log.add_span(start, Cause.DATA_WAIT)
            self._tell_of_batch()
            return result

        return wait

    def _watch_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        times, pid = self.worker_times, self._pid

        def fetch(*arguments: Any, **options: Any) -> Any:
            if os.getpid() == pid:
                return original(*arguments, **options)
            before = workers.now()
            batch = original(*arguments, **options)
            times.add(before)
            return batch

        return fetch

    def _watch_call(
        self, cause: Cause, detail: str, original: Callable[..., Any], depth: int = 2
    ) -> Callable[..., Any]:
        log, pid = self._log, self._pid

        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return original(*arguments, **options)
            finally:
                if os.getpid() == pid:
                    log.add_span(start, cause, detail, depth)

        return call

    def _watch_collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = self._watch_call(Cause.COMMUNICATION, name, original, depth=3)

        def call(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # Dynamo knows the original
                return original(*arguments, **options)
            return watched(*arguments, **options)

        return call

    def _watch_exchange(self, original: Callable[..., Any]) -> Callable[..., Any]:
        log, pid = self._log, self._pid

        def wait(exchange: Any, *arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return original(exchange, *arguments, **options)
            finally:
                if os.getpid() == pid:
                    log.add_span(start, Cause.COMMUNICATION, exchange.label)

        return wait

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self.mark_step(id(optimizer))

    def mark_step(self, stepper: int) -> None:
        """A step is over; ``stepper`` tells those that count together."""
        if os.getpid() != self._pid:
            return
        self._log.add_mark(stepper)
        if self.on_step is not None:
            self.on_step(stepper)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = threading.get_ident(), clock()
        elif self._collecting is not None and self._collecting[0] == threading.get_ident():
            start, self._collecting = self._collecting[1], None
            if os.getpid() == self._pid:
                stays_ns = info["collected"] * COLLECT_NS
                self._log.add_span(start, Cause.GC, f"generation {info['generation']}", stays_ns=stays_ns)

    def _on_compile(self) -> None:
        self._compiling[threading.get_ident()] = clock()

    def _on_compiled(self) -> None:
        self.num_compiles += 1
        start = self._compiling.pop(threading.get_ident(), None)
        if start is not None and os.getpid() == self._pid:
            self._log.add_span(start, Cause.COMPILE, "torch.compile", depth=3)

    def _on_break(self, text: str) -> None:
        self._log.breaks.append((clock(), text))
