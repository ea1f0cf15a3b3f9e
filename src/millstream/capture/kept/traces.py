"""A trace as a file, and what a later process needs to know before it takes that for its own.

Within one process a graph is guarded by what the step has read, as far as that can change there. Between processes
everything can: so all that was read is compared, by what it is, together with the code that ran, the state, the form of
the call, and whatever a lowered program depends on (``lower.kept.key``). Where one thing differs, or cannot be
compared, the step is traced.

**Contract**
- A trace is taken only where tracing would give the same one.
- Nothing of the user's is called, and nothing is changed, but for what the step is known to read or count.
- The file is run, as it holds functions by name: it is read only from a folder that nobody else can write.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from millstream._torch.autograd.hooks import HOOKS_OF_MODULE, has_tensor_hooks, hooks_for_all, hooks_of_optimizer
from millstream._torch.dispatcher import replaced_by_others
from millstream._torch.distributed.wrappers import data_parallel_wrappers
from millstream.cache import cache_folder, limit_bytes, read_private, trim, write_private
from millstream.capture.effects.host_effects import Effects, Output
from millstream.capture.kept.descriptions import TraceNotKept, digest_of
from millstream.capture.kept.graph_data import decode_graph, encode_graph
from millstream.capture.kept.pickling import Pickler, PlainPickler, Unpickler
from millstream.capture.kept.told import find_read, functions_that_ran, tell, told_reads
from millstream.capture.kept.ways import STATE, Reader, Start, WayWriter
from millstream.capture.record.location import Location
from millstream.capture.record.paths import places_in
from millstream.capture.record.reads import Read, Write, is_a
from millstream.capture.record.recorded_code import make_recorder
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.discover import Found
from millstream.capture.state.lift import lift
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.request import Request, Traced
from millstream.lower.kept.key import ProgramNotKept as NotDescribed
from millstream.lower.kept.key import describe_settings
from millstream.lower.kept.program_files import is_on
from millstream.tree.spec import Reference, Structure, walk

LOGGER = logging.getLogger("millstream")
MOST_VARIANTS = 4
"""Traces of one function for arguments that look alike."""


@dataclass
class Learned:
    """Facts that a step learned of its numbers and flags before it was traced like this; see ``StepState``."""

    lifted: list[Location] = field(default_factory=list)
    read: list[Location] = field(default_factory=list)
    cycled: list[Location] = field(default_factory=list)
    counted: list[tuple[Any, str]] = field(default_factory=list)
    converts: bool | None = None
    unsteady: list[Tensor] = field(default_factory=list)
    late: list[tuple[str, Any]] = field(default_factory=list)  # objects that were found while it was traced


@dataclass
class Kept:
    """A trace that was found on disk, of objects of this process."""

    learned: Learned
    _numbers: tuple[Any, ...]
    _structure: Structure
    _outputs: Sequence[Output]
    _questions: Questions
    _effects: Effects
    _optimizers: Sequence[Optimizer]
    _record: Recorder
    _state: Sequence[Tensor]
    _seen: Sequence[tuple[list[int], list[int]]]
    _plain: dict[str, Any]
    _graph: dict[str, Any]

    def traced(self, request: Request) -> Traced:
        """The trace, where ``request`` asks for that.

        Raises:
            NotKept: It asks for something else.
        """
        state = [entry.tensor for entry in request.state]
        if len(state) != len(self._state) or not all(map(is_, state, self._state)):
            raise TraceNotKept("it reaches other state")
        if _numbers_of(request) != self._numbers or request.converts != self.learned.converts:
            raise TraceNotKept("it reads other numbers")
        values = [number.location.get() for number in request.numbers]
        if self._questions.derive(values) is None:
            raise TraceNotKept("its numbers lead another way")
        looked_at, asked = (
            {id(state[i]) for i in own} | {id(request.arguments[i]) for i in given} for own, given in self._seen
        )
        return Traced(
            **self._plain,
            gm=decode_graph(self._graph),
            structure=self._structure,
            outputs=[*self._outputs],
            questions=self._questions,
            values=values,
            effects=self._effects,
            optimizers=[*self._optimizers],
            looked_at=looked_at,
            asked=asked,
            record=self._record,
            replaced=[],
            wrapper_reads={},
        )


_PLAIN_PARTS = ("state", "gradients", "numbers", "arguments", "written", "left", "kept")
_PLAIN_PARTS += ("writes_arguments", "num_converted")
"""Of a trace, what has no objects in it."""


def open_shelf(
    function: Any, key: Any, structure: Structure, arguments: Sequence[Tensor], *, draws_by_generator: bool
) -> Shelf | None:
    """The shelf for a call; ``None`` where traces are not kept, or cannot be."""
    if not is_on() or os.environ.get("MILLSTREAM_TRACES") == "0":
        return None
    try:
        return Shelf(function, key, structure, arguments, draws_by_generator=draws_by_generator)
    except TraceNotKept as reason:
        LOGGER.debug("the trace is not kept on disk: %s", reason)
        return None


class Shelf:
    """The files that hold traces of one function, for calls of one form.

    Args:
        function: The step's.
        key: Of the call, as ``key_of`` gives it.
        structure: Of the call's arguments.
        arguments: Its tensors.
        draws_by_generator: Whether PyTorch's generators give all random numbers.

    Attributes:
        outcome: What has come of looking there or of keeping one, for people; empty where there is nothing to say.

    Raises:
        NotKept: Something has no text that says all about it.
    """

    def __init__(
        self, function: Any, key: Any, structure: Structure, arguments: Sequence[Tensor], *, draws_by_generator: bool
    ) -> None:
        _, (_, *modes), *specs = key
        plain = getattr(function, "__func__", function)
        if not is_a(plain, FunctionType):
            raise TraceNotKept("the step is no function")
        try:
            settings = [*describe_settings({})]
        except NotDescribed as reason:
            raise TraceNotKept(str(reason)) from None
        parts = [*settings, plain.__module__, plain.__qualname__, digest_of(plain.__code__), repr(modes), repr(specs)]
        parts.append(repr(draws_by_generator))
        if others := replaced_by_others():
            raise TraceNotKept(f"others have put code in the place of {', '.join(others[:3])}")
        self._digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]
        self._function, self._form, self._arguments = function, key[0], arguments
        self._objects = [part.target for _, part in walk(structure, "") if isinstance(part, Reference)]
        self.outcome = ""

    def find(self, found: Found, discover_more: Callable[[Any], Found]) -> Kept | None:
        """A trace of which all that was read holds here.

        Args:
            found: What the step reaches.
            discover_more: Gives what it reaches together with other objects.
        """
        for variant in range(MOST_VARIANTS):
            data = read_private(self._path(variant))
            if data is None or hashlib.sha256(data[32:]).digest() != data[:32]:
                continue
            try:
                return self._load(zlib.decompress(data[32:]), found, discover_more)
            except TraceNotKept as reason:
                self._note(reason)
            except Exception as error:  # noqa: BLE001  whatever is wrong with it: the step can be traced
                LOGGER.debug("a kept trace cannot be used: %s: %s", type(error).__name__, error)
        return None

    def take(self, kept: Kept, request: Request) -> Traced | None:
        """The trace for a request; ``None`` where it is for another one."""
        try:
            traced = kept.traced(request)
        except TraceNotKept as reason:
            self._note(reason)
            return None
        self.outcome = "its trace was on disk"
        return traced

    def _note(self, reason: TraceNotKept) -> None:
        self.outcome = f"the trace on disk is not taken: {reason}"
        LOGGER.debug(self.outcome)

    def keep(self, request: Request, traced: Traced, learned: Learned) -> None:
        """Write a trace, where all of it can be told."""
        data = None
        try:
            data = zlib.compress(self._dump(request, traced, learned), 1)
        except TraceNotKept as reason:
            self.outcome = f"its trace is not kept on disk: {reason}"
        except Exception as error:  # noqa: BLE001  whatever cannot be told: it is traced in every process
            self.outcome = f"its trace is not kept on disk: {type(error).__name__}: {error}"
        if data is None:
            LOGGER.debug(self.outcome)
            return
        free = (variant for variant in range(MOST_VARIANTS) if not self._path(variant).exists())
        write_private(self._path(next(free, 0)), hashlib.sha256(data).digest() + data)
        trim(limit_bytes())

    def _path(self, variant: int) -> Path:
        return cache_folder() / "traces" / f"{self._digest}{f'-{variant}' if variant else ''}.trace"

    # --- writing ------------------------------------------------------------------------------------------------------

    def _dump(self, request: Request, traced: Traced, learned: Learned) -> bytes:
        _check_ordinary(request.found)
        record = traced.record
        if record.fleeting:
            raise TraceNotKept(f"it depends on what another process has not: {record.fleeting}")
        if traced.replaced or traced.sizes is not None or traced.wrapper_reads or request.replica is not None:
            raise TraceNotKept("it has arguments of many sizes, state that is replaced, or several processes")
        if traced.flags:
            raise TraceNotKept(f"it depends on the value of {traced.flags[0].name}")
        if traced.questions.draws or traced.questions.borrowed or traced.effects.conditions or request.is_plain:
            raise TraceNotKept("it draws random numbers on the host, or asks the host")
        state = [entry.tensor for entry in request.state]
        reads = told_reads(record, request)
        writer = WayWriter(Start(self._function, self._objects, state), [*reads, *record.writes])
        of_code = {each.__code__: each for each in writer.known() if is_a(each, FunctionType)}
        late = (
            (name, each, each.__code__ if is_a(each, FunctionType) else None) for name, each in learned.late
        )  # or stands for such code
        learned = replace(learned, late=[(name, of_code.get(code, each)) for name, each, code in late])
        numbers = places_in(number.location.entry for number in request.numbers)
        told, written = (
            [each for read in found if (each := tell(writer, read, record, numbers)) is not None]
            for found in (reads, record.writes)
        )
        ran = functions_that_ran(writer, record)
        seen = [_positions(each, state, request.arguments) for each in (traced.looked_at, traced.asked)]
        plain = {name: getattr(traced, name) for name in _PLAIN_PARTS}
        body = io.BytesIO()
        Pickler(body, writer).dump(
            (
                self._form,
                learned,
                _numbers_of(request),
                traced.structure,
                tuple(traced.outputs),
                traced.questions,
                replace(traced.effects, outline=None),
                tuple(traced.optimizers),
            )
        )
        content = _specs(state), writer.entries, told, written, ran, seen, plain, encode_graph(traced.gm)
        whole = io.BytesIO()
        PlainPickler(whole, protocol=5).dump((*content, body.getvalue()))
        return whole.getvalue()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _load(self, data: bytes, found: Found, discover_more: Callable[[Any], Found]) -> Kept:
        _check_ordinary(found)
        specs, entries, told, written, ran, seen, plain, graph, body = Unpickler(io.BytesIO(data)).load()
        given = {*map(id, self._arguments)}
        state = [entry.tensor for entry in lift(found) if id(entry.tensor) not in given]
        reader = Reader(Start(self._function, self._objects, state), entries)
        if not given.isdisjoint(map(id, reader.objects)):
            raise TraceNotKept("an argument is used by a name, too")
        record = make_recorder(self._function, self._arguments)
        record.restore(
            [find_read(reader, Read, each) for each in told],
            [find_read(reader, Write, each) for each in written],
            [reader.objects[number].__code__ for number in ran],
        )
        form, learned, *parts = Unpickler(io.BytesIO(body), reader).load()
        if form != self._form:
            raise TraceNotKept("its arguments have another form")
        if late := learned.late:
            if any(way[0] == STATE for way, _ in entries):
                raise TraceNotKept("it finds state late")
            found = discover_more(late)
            _check_ordinary(found)
            state = [entry.tensor for entry in lift(found) if id(entry.tensor) not in given]
        if _specs(state) != specs:
            raise TraceNotKept("its state is another")
        numbers, structure, outputs, questions, effects, optimizers = parts
        return Kept(
            learned, numbers, structure, outputs, questions, effects, optimizers, record, state, seen, plain, graph
        )


def _check_ordinary(found: Found) -> None:
    """Refuse what is compared by other means than reads.

    Raises:
        NotKept: There are hooks, or wrappers for data parallelism.
    """
    modules = [module for _, root in found.modules for module in root.modules()]
    tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    has_hooks = any(getattr(module, name) for module in modules for name in HOOKS_OF_MODULE)
    has_hooks |= any(has_tensor_hooks(tensor) for tensor in tensors if tensor is not None)
    if has_hooks or hooks_for_all() or any(hooks_of_optimizer(optimizer) for _, optimizer in found.optimizers):
        raise TraceNotKept("there are hooks")
    if any(data_parallel_wrappers()):
        raise TraceNotKept("there are wrappers for data parallelism")


def _specs(state: Sequence[Tensor]) -> list[Any]:
    """Return what is known of state but its values, and what of it lies in the same memory."""
    memory: dict[int, int] = {}
    return [
        (
            f"{type(each).__module__}.{type(each).__qualname__}",
            (tuple(each.shape), each.stride(), each.storage_offset(), str(each.dtype), str(each.device)),
            (each.requires_grad, each.is_leaf, each.is_conj(), each.is_neg()),
            None if each.grad is None else (tuple(each.grad.shape), each.grad.stride(), str(each.grad.dtype)),
            memory.setdefault(each.untyped_storage()._cdata, len(memory)),
        )
        for each in state
    ]


def _numbers_of(request: Request) -> tuple[Any, ...]:
    """The numbers that the graph is given: where they are, or of which optimizer."""
    optimizers = {id(optimizer): number for number, (_, optimizer) in enumerate(request.found.optimizers)}
    return tuple(
        (
            None if number.is_argument or number.optimizer is not None else number.location,
            optimizers.get(id(number.optimizer)),
            number.label,
            str(number.location),
            str(number.device),
        )
        for number in request.numbers
    )


def _positions(seen: set[int], state: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [i for i, each in enumerate(state) if id(each) in seen], [
        i for i, each in enumerate(arguments) if id(each) in seen
    ]
