"""What happens at each read, write and call that a recorder tells of while a step is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from io import IOBase
from types import BuiltinFunctionType, FrameType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream.capture.effects.host_generators import GENERATORS
from millstream.capture.lines import (
    here,
)
from millstream.capture.record.interpreter.natives import owner_of
from millstream.capture.record.location import Location
from millstream.capture.record.paths import items_of, location_of, path_of
from millstream.capture.record.reads import Kind, Read, Write, is_a
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.discover import is_unknown, lacks_cache
from millstream.capture.state.executed import CodeWatch, others_may_write
from millstream.capture.state.impure import ImpureCalls
from millstream.capture.state.relevant import counts
from millstream.capture.state.snapshot import StateSnapshot, is_type_of_tracing
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.scalars import is_scalar
from millstream.capture.trace.numbers.users_numbers import UsersNumbers
from millstream.capture.trace.outcome.changes import Changes
from millstream.capture.trace.patches.caches import CachesUnfilled
from millstream.capture.trace.patches.randomness import RandomState
from millstream.capture.trace.per_call.stand_ins import StandIns
from millstream.capture.trace.refusing.refused_code import RefusedCode
from millstream.capture.trace.refusing.step_failures import StepFailures
from millstream.capture.trace.refusing.unsupported import find_unsupported
from millstream.capture.trace.request import (
    FoundLate,
    NumbersChanged,
    Request,
    StateMissing,
    TypesCompared,
)
from millstream.capture.trace.watches.traced_switches import SwitchWatch
from millstream.errors import CaptureError

WANTED = (*GENERATORS, IOBase, Optimizer, GradScaler, BuiltinFunctionType, MethodType)
"""Classes of objects that are looked at before the step uses them, and of what may be their methods, or clocks."""


_NUMBERS = (int, float, complex, np.number)


class StepEvents:
    """Does what has to be done where a recorder tells of a read, a write, a call or code of the step's.

    Args:
        request: What is traced.
        record: The recorder's.
        numbers: Those of the request.
        code: What refuses code.
        stand_ins: What makes other things stand in for what is read.
        switches: PyTorch's.
        failures: Ends the trace.

    Attributes:
        is_asked: Whether to look at each instruction, see ``happens``.
        snapshot: What was there before the step; set later, as what follows.
        changes: What the step has changed by now.
        caches: Those of functions.
        random_state: Of random generators.
        record_output: Called with files and functions that the step writes to.
    """

    snapshot: StateSnapshot
    changes: Changes
    caches: CachesUnfilled
    random_state: RandomState
    record_output: Callable[[Any], None]

    def __init__(
        self,
        request: Request,
        record: Recorder,
        numbers: UsersNumbers,
        code: RefusedCode,
        stand_ins: StandIns,
        switches: SwitchWatch,
        failures: StepFailures,
    ) -> None:
        self.is_asked = False
        self._others_may_write = False
        self._unsupported = {id(each): error for each, error in find_unsupported(request.found)}
        self._found = request.found
        self._has_sizes, self._is_plain = bool(request.dimensions), request.is_plain
        self._modules = {id(module) for _, root in request.found.modules for module in root.modules()}
        self._record = record
        self._numbers = numbers
        self._code = code
        self._stand_ins = stand_ins
        self._report = failures.report
        self._watch = CodeWatch(
            self._on_code,
            ImpureCalls(record.is_new, code.on_impure, code.on_debugger, lambda _: switches.note_set(here())),
            code.has_found,
            code.on_opaque,
            code.on_text,
            code.on_extension,
        )

    def reaches_leaf(self) -> None:
        """Stop before code that asks autograd's graph for the parameters that it leads to: there those are twins."""
        self._report(
            CaptureError(
                "The step follows autograd's graph to the parameters at its end (next_functions, variable).",
                where=here(),
                remedy="Do that once, outside of the step.",
            )
        )

    def compares(self, kind: type, others: Iterable[Any]) -> None:
        """Stop where code asks whether the class of what stands for a number is that of a number."""
        is_stand_in = issubclass(kind, (torch.SymInt, torch.SymFloat))
        if not is_stand_in or not any(type(each) is type and issubclass(each, _NUMBERS) for each in others):
            return
        error = CaptureError(
            "The step compares the type of something with int or float, while numbers change.",
            where=here(),
            remedy="Ask isinstance(number, int) instead.",
        )
        can_be_plain = not issubclass(kind, HostScalar) and (self._has_sizes or self._numbers.scalars)
        self._report(TypesCompared(error) if can_be_plain and not self._is_plain else error)

    def begin(self) -> None:
        """The step is about to run."""
        self._others_may_write = others_may_write()
        self.is_asked = self._others_may_write or bool(self._unsupported)

    def happens(self, operands: tuple[Any, ...]) -> None:
        """Refuse what must not be used, and see whether another thread has written meanwhile where the step counts."""
        for each in operands if self._unsupported else ():
            if id(each) in self._unsupported:
                self._report(self._unsupported[id(each)])
        if self._others_may_write:
            self._numbers.take_from_others(self.snapshot)

    def begins(self, frame: FrameType) -> None:
        """Code is about to run."""
        self._watch.begins(frame)

    def calls(self, frame: FrameType, function: Any, arguments: tuple[Any, ...]) -> None:
        """A function is about to be called."""
        for each in (owner_of(function), *arguments):
            if is_a(each, (*GENERATORS, IOBase)) and self._record.seems_before(each):
                self._note_state(each, type(each).__name__)
        self._watch.calls(frame, function, arguments)

    def writes(self, write: Write) -> None:
        """Note what is there before the step writes."""
        self.snapshot.add_written(write)

    def exposes(self, read: Read) -> None:
        """Note what is there before something in C may write; stop at a cache that the request does not have."""
        cache = read.holder
        if isinstance(cache, functools._lru_cache_wrapper) and lacks_cache(cache, self._found):
            self._report(FoundLate(f"{cache.__name__}()", cache, here()))
        self.snapshot.add_exposed(read)

    def meets(self, read: Read) -> None:
        """Have things stand in for others before the step finds these; stop at what the request does not have."""
        name = path_of(read, self._record)
        for each in read.held():
            if each is print:
                self.record_output(print)
        if not self._record.was_before(read):
            return
        if read.kind is Kind.TYPE:
            self._note_state(read.holder, name)
        elif not counts(read, self._record):
            return
        elif read.kind is Kind.CONTENTS and isinstance(read.holder, dict | list):
            holder = read.holder
            for key, value in [*(dict.items(holder) if isinstance(holder, dict) else enumerate(holder))]:
                self._stand_ins.make(Location(items_of(holder), key, f"{name}[{key!r}]"), value)
        elif (place := location_of(read, self._record)) is not None:
            self._stand_ins.make(place, read.value)

    def forwards(self, module: nn.Module) -> None:
        """Stop at a module that the request does not have; refuse any where all have what cannot be captured."""
        if id(None) in self._unsupported:
            self._report(self._unsupported[id(None)])
        if id(module) not in self._modules and not self._record.is_new(module):
            self._report(FoundLate(type(module).__name__, module, ""))

    def asks(self, source: Any, read: Read | None) -> None:
        """Refuse a step that asks an iterator, which would give each item once."""
        self._code.asks(source, read)

    def _note_state(self, value: Any, name: str) -> None:
        """Something of the user's is about to be used whose state has to be noted, or which the request must have."""
        if isinstance(value, GENERATORS):
            self.random_state.add(name, value)
        elif isinstance(value, IOBase):
            self.record_output(value)
        elif is_unknown(value, self._found):
            self._report(FoundLate(name, value, here()))

    def _on_code(self, frame: FrameType) -> None:
        """Stop before code of the user's that a trace cannot follow."""
        if self.caches.is_for_cache(frame, self._found.cached):  # which has no answer yet
            asked = frame.f_locals.values()
            if any(map(is_scalar, asked)):
                self._report(
                    CaptureError(
                        f"The step calls {frame.f_code.co_name}, which has a cache, with a number that changes.",
                        where=here(num_left_out=1),
                        remedy="Call the function without its cache, as in function.__wrapped__(number).",
                    )
                )
            if not any(map(is_type_of_tracing, asked)):  # for which an eager call would bring no answer
                if new := self.changes.numbers_missing():
                    self._report(NumbersChanged(new))
                self._report(StateMissing(f"{frame.f_code.co_name}'s cache", here(num_left_out=1)))
