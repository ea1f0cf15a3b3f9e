"""From a call to what must be traced, and from the trace to a graph that can be built and run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.distributed.fully_sharded import local_of
from millstream._torch.seeded_randoms import draws_by_generator
from millstream._torch.tensors import storage_id
from millstream._torch.workarounds import is_off
from millstream.capture.effects.expressions import text_of
from millstream.capture.guards import native
from millstream.capture.guards.derive import expect_of_arguments, make_guards
from millstream.capture.guards.recheck import listing_of
from millstream.capture.kept.traces import Learned
from millstream.capture.record.location import Location, TensorItem
from millstream.capture.state.code import counted_in
from millstream.capture.state.discover import Found
from millstream.capture.state.executed import name_of, others_may_write
from millstream.capture.state.lift import Lifted, device_of, find_host_scalars, lift
from millstream.capture.state.signature import RESOLVE_REMEDY, is_lazy_view, settings_of
from millstream.capture.step.calls import StepCall
from millstream.capture.step.graph import (
    STATE_NAMES,
    AddressRanges,
    DeviceScalar,
    Slot,
    StepGraph,
    is_alike,
    restore_gradients,
)
from millstream.capture.step.symbolic_sizes import SizeGuard
from millstream.capture.trace.numbers.scalars import is_number
from millstream.capture.trace.patches.optimizers import counts_of, numbers_of
from millstream.capture.trace.request import Gradient, NumberInput, OtherFlags, Request, Traced
from millstream.errors import CaptureError
from millstream.tree.containers import is_open_container


@dataclass
class StepState:
    """What the graphs of one step share."""

    is_checked: bool = False  # whether they are compared with what would be captured later
    options: Mapping[str, Any] = field(default_factory=dict)  # of TorchInductor, the user's
    cycled: set[Location] = field(default_factory=set)  # hyperparameters that were seen to change: graphs read them
    # keys under which optimizers were seen to count their steps, in their state or as attributes
    counted: set[tuple[Optimizer, str]] = field(default_factory=set)
    # places that were seen to hold another tensor than before: graphs read what is there in each call
    changing: set[Location] = field(default_factory=set)
    # for a tensor, by id, itself and the gradient that graphs read and write
    grad_buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # places of other numbers of the user's that the step was seen to change
    lifted: dict[Location, None] = field(default_factory=dict)
    read: dict[Location, None] = field(default_factory=dict)  # those that were seen to change between calls
    guessed: set[Location] = field(default_factory=set)  # those that were expected to, as others beside them
    # of those, the ones without which no graph could be captured: each value has a graph
    kept: set[Location] = field(default_factory=set)
    converts: bool | None = None  # see ``Request``
    compared: CaptureError | None = None  # why there is a graph for each number that changes, if so
    settled: set[Any] = field(default_factory=set)  # changes of other plain values that were seen
    unsteady: set[int] = field(default_factory=set)  # memory of flags that the step writes
    waits_for_flags: bool = False  # whether the host may wait for a device to know others

    @property
    def draws_by_generator(self) -> bool:
        """Whether PyTorch's generators are to give random numbers within control flow, too."""
        return is_off("seeded-bodies") or draws_by_generator(self.options)

    def make_request(
        self, call: StepCall, roots: list[tuple[str, Any]], found: Found, like: StepGraph | None = None
    ) -> Request:
        """Say what to trace.

        Args:
            call: The step's.
            roots: Where the search begins.
            found: What it has found.
            like: A graph whose numbers and places are to be read at run time, and no others.

        Raises:
            CaptureError: Arguments are not apart, or something cannot be lifted.
        """
        arguments = {id(argument) for argument in call.arguments}
        if torch.is_grad_enabled() and any(
            argument.requires_grad and not argument.is_leaf for argument in call.arguments
        ):
            raise CaptureError(
                "An argument was computed with gradients, which would have to reach beyond the step.",
                remedy="Compute it inside of the step, or detach it.",
            )
        if any(argument.layout is not torch.strided for argument in call.arguments):
            raise CaptureError("An argument is a sparse or nested tensor.", remedy="Pass dense tensors.")
        if any(is_open_container(value) and id(value) not in call.held for _, value in call.objects()):
            raise CaptureError(
                "An argument has an attribute that leads back to it.", remedy="Pass what the step needs of it."
            )
        if any(map(is_lazy_view, call.arguments)):
            raise CaptureError("An argument is a conjugated or negated view.", remedy=RESOLVE_REMEDY)
        state = [entry for entry in lift(found) if id(entry.tensor) not in arguments]
        numbers: list[NumberInput] = []
        for _, optimizer in found.optimizers:
            numbers += (
                number
                for number in numbers_of(optimizer)
                if number.location.key == "lr" or number.location.entry in self.cycled
            )
            for key in sorted(key for counting, key in self.counted if counting is optimizer):
                numbers += counts_of(optimizer, key)
        if others_may_write():  # they may count on, too, and write over plain numbers unnoticed
            self.lifted |= dict.fromkeys(_counters(found))
        device = device_of([*(entry.tensor for entry in state), *call.arguments])
        lifted = (NumberInput(location, str(location), device) for location in self.lifted | self.read)
        numbers += (number for number in lifted if is_number(number.location.get()))
        if like is not None:
            numbers = [number for number in numbers if number.location in like.sources]
        numbers += call.numbers(device)
        return Request(
            function=call.function,
            structure=call.structure,
            arguments=call.arguments,
            opened=call.opened,
            roots=roots,
            found=found,
            state=state,
            gradients=[
                Gradient(entry.name, entry.tensor, entry.tensor.grad)
                for entry in state
                if (entry.tensor.requires_grad or entry.tensor.grad is not None)
            ],
            numbers=numbers,
            changing={*self.changing} if like is None else like.changing,
            host_scalars=find_host_scalars(state),
            settings=settings_of(call.key),
            settled=self.settled,
            unsteady={*self.unsteady} if like is None else like.unsteady,
            waits_for_flags=self.waits_for_flags if like is None else like.waits_for_flags,
            converts=self.converts,
            draws_by_generator=self.draws_by_generator,
        )

    def note_reads(self, found: Found, changed: Sequence[Location], beside: Iterable[Location] = ()) -> None:
        """Let graphs read numbers that were seen to change between calls, but for those of optimizers and scalers.

        Where numbers of one object change one after the other, the next ones are expected to: else each had a graph.

        Args:
            found: What the step reaches.
            changed: Places of numbers that are others than they were.
            beside: Places of all numbers that the step reads.
        """
        if found.cached:  # a cache gives what it made of the number, and the trace does not see that
            return
        owners = _holders_of_optimizers(found)
        owners += (vars(entry.tensor) for entry in lift(found))  # which have other attributes while they are fake
        own = set(map(id, owners))
        before = {id(each.holder) for each in self.read.keys() - {*changed}}
        again = before.intersection(id(each.holder) for each in changed)
        self.guessed.difference_update(changed)
        known = {*changed, *self.read, *self.guessed}
        guesses = [each for each in beside if id(each.holder) in again and type(each.get()) is float]
        guesses = [each for each in guesses if each not in known]
        self.guessed.update(guesses)
        places = (*changed, *guesses)
        self.read |= dict.fromkeys(each for each in places if id(each.holder) not in own and each not in self.kept)

    def learned(self, request: Request, late: Sequence[tuple[str, Any]]) -> Learned:
        """What of all this a request has."""
        places = [number.location for number in request.numbers]
        used = {number.optimizer for number in request.numbers}
        return Learned(
            [each for each in self.lifted if each in places],
            [each for each in self.read if each in places],
            [each for each in self.cycled if any(place.entry == each for place in places)],
            [each for each in self.counted if each[0] in used],
            request.converts,
            [entry.tensor for entry in request.state if storage_id(entry.tensor) in request.unsteady],
            [*late],
        )

    @contextlib.contextmanager
    def learning(self, learned: Learned) -> Iterator[Callable[[], None]]:
        """Take what another process has learned; it is forgotten again unless what this yields is called."""
        before = {**self.lifted}, {**self.read}, {*self.cycled}, {*self.counted}, {*self.unsteady}, self.converts
        kept: list[bool] = []
        self.lifted |= dict.fromkeys(learned.lifted)
        self.read |= dict.fromkeys(learned.read)
        self.cycled |= {*learned.cycled}
        self.counted |= {*learned.counted}
        self.unsteady |= {*map(storage_id, learned.unsteady)}
        self.converts = learned.converts
        yield lambda: kept.append(True)
        if not kept:
            self.lifted, self.read, self.cycled, self.counted, self.unsteady, self.converts = before

    def keep_reads(self) -> bool:
        """Let graphs hold for one value each of these again, of guesses first; returns whether there are any."""
        if guesses := self.read.keys() & self.guessed:
            self.read = {each: None for each in self.read if each not in guesses}
            return True
        changed = bool(self.read)
        self.kept |= self.read.keys()
        self.read.clear()
        return changed

    def note_counts(self, found: Found, changed: Iterable[Location]) -> None:
        """Let graphs read numbers that the step itself changes.

        Args:
            found: What the step reaches.
            changed: In a parameter group, an entry of the state, an optimizer's attributes, or objects of the user's.
        """
        for location in changed:
            for _, optimizer in found.optimizers:
                if any(entry is location.holder for entry in (vars(optimizer), *optimizer.state.values())):
                    self.counted.add((optimizer, location.key))
                    break
                if any(group is location.holder for group in optimizer.param_groups):
                    self.cycled.add(location)
                    break
            else:
                self.lifted[location] = None

    def note_flags(self, flags: OtherFlags, like: StepGraph | None) -> None:
        """Treat flags otherwise in the next trace, unless that is compared with a graph, which has them as it has."""
        if like is not None:
            raise flags
        self.unsteady |= flags.unsteady
        self.waits_for_flags |= flags.needs_waiting

    def assemble(self, call: StepCall, request: Request, traced: Traced, seconds: float) -> StepGraph:
        """Put real tensors to the inputs of a traced graph.

        Raises:
            CaptureError: An argument shares memory with another or with state, and one of them is written, or the graph
                has state that is on meta.
        """
        static: list[Tensor] = []
        names: list[str] = []
        device_scalars: list[DeviceScalar] = []
        for index in traced.state:
            entry = request.state[index]
            names.append(entry.name)
            if entry.tensor.is_meta:
                raise CaptureError(
                    f"The step computes with {entry.name}, which is on meta and has no values.",
                    remedy="Keep what it computes with on a device.",
                )
            if index in request.host_scalars:
                device_scalars.append(_device_scalar(entry, request.host_scalars[index]))
                static.append(device_scalars[-1].slot.tensor)
            else:
                static.append(local_of(entry.tensor).detach())
        own_memory = AddressRanges(_not_to_be_shared(request, traced, static))
        given = [*call.arguments, *(request.state[index].tensor for index, _ in traced.replaced)]
        if not own_memory.is_apart_from(given, among_each_other=traced.writes_arguments):
            raise CaptureError(
                "An argument shares memory with state or with another argument, and the step writes one of them.",
                remedy="Pass a clone of it.",
            )
        # From here on nothing fails: only now may gradients be moved to where graphs have them.
        before = self._settle_gradients(request.gradients, traced.kept)
        after = [
            (old if old is not None else self._grad_buffer(gradient)) if is_left else None
            for gradient, old, is_left in zip(request.gradients, before, traced.left, strict=True)
        ]
        grad_buffers: list[Tensor] = []
        for index in traced.gradients:
            gradient, old = request.gradients[index], before[index]
            names.append(f"{gradient.name}.grad")
            grad_buffers.append(old if old is not None else self._grad_buffer(gradient))
        static += map(local_of, grad_buffers)
        known = traced.questions.names([_name_number(request.found, number) for number in request.numbers])
        slots = [Slot.like(each.tensor) for each in traced.questions.inputs]
        for index in traced.numbers:
            names.append(text_of(traced.questions.inputs[index].of, known))
            static.append(slots[index].tensor)
        parameters = [
            request.state[index].tensor
            for index, is_written in zip(traced.state, traced.written, strict=False)
            if is_written and isinstance(request.state[index].tensor, nn.Parameter)
        ]
        traced.gm.meta[STATE_NAMES] = tuple(names)
        guards = make_guards(request, traced, before, grad_buffers)
        if any(tensor.device.type in native.DEVICES for tensor in guards.watched):
            guards.quicken(parameters)
        return StepGraph(
            signature=call.signature,
            state_names=names,
            gm=traced.gm,
            trace_seconds=seconds,
            key=call.key,
            form=call.form,
            guards=guards,
            static=static,
            arguments=traced.arguments,
            places=[location for _, location in traced.replaced],
            expected=expect_of_arguments(request, traced),
            sizes=None if traced.sizes is None else SizeGuard(traced.sizes),
            changing=request.changing,
            unsteady=request.unsteady,
            waits_for_flags=request.waits_for_flags,
            listing=listing_of(request, traced) if self.is_checked else [],
            sources=[number.location for number in request.numbers],
            slots=slots,
            device_scalars=device_scalars,
            numbers=traced.values,
            hyperparameters=[
                (index, f"{type(number.optimizer).__name__}.{number.location}")
                for index, number in enumerate(request.numbers)
                if number.optimizer is not None
            ],
            questions=traced.questions,
            left=[
                (gradient.parameter, new)
                for gradient, old, new in zip(request.gradients, before, after, strict=True)
                if new is not old
            ],
            structure=traced.structure,
            outputs=traced.outputs,
            effects=traced.effects,
            containers=[each for each in traced.record.containers() if is_open_container(each)],
            stepped=[vars(optimizer) for optimizer in traced.optimizers],
            written=[tensor for tensor, is_written in zip(static, traced.written, strict=False) if is_written],
            parameters=parameters,
            own_memory=own_memory,
            writes_arguments=traced.writes_arguments,
        )

    def forget(self, graphs: Iterable[StepGraph]) -> None:
        """Keep only the gradients that ``graphs`` use."""
        used = {id(tensor) for graph in graphs for tensor in graph.guards.watched}
        self.grad_buffers = {key: buffer for key, buffer in self.grad_buffers.items() if key in used}

    def _settle_gradients(self, gradients: Sequence[Gradient], kept: Sequence[bool]) -> list[Tensor | None]:
        """Bring the gradients that there are to where graphs have them, and return those places.

        One that the step replaces is left alone: the caller may have it, as the result of an eager call.
        """
        owners = {id(buffer): tensor for tensor, buffer in self.grad_buffers.values()}
        misplaced: list[tuple[Tensor, Tensor]] = []
        for gradient, is_kept in zip(gradients, kept, strict=True):
            tensor, before = gradient.parameter, gradient.before
            if before is None:
                continue
            known = self.grad_buffers.get(id(tensor))
            if known is None or not is_alike(before, known[1]):
                is_own = is_kept and owners.get(id(before), tensor) is tensor
                known = self.grad_buffers[id(tensor)] = (tensor, before if is_own else torch.empty_like(before))
            if known[1] is not before:
                misplaced.append(known)
        restore_gradients(misplaced)
        return [gradient.parameter.grad for gradient in gradients]

    def _grad_buffer(self, gradient: Gradient) -> Tensor:
        """The place for a gradient where there is none yet."""
        tensor = gradient.parameter
        known = self.grad_buffers.get(id(tensor))
        if known is None or known[1].shape != tensor.shape or known[1].dtype != tensor.dtype:
            known = self.grad_buffers[id(tensor)] = (tensor, torch.zeros_like(tensor, requires_grad=False))
        return known[1]


def _not_to_be_shared(request: Request, traced: Traced, static: Sequence[Tensor]) -> Iterator[Tensor]:
    """State in whose memory no argument may lie: what the graph writes, or all it depends on if it writes arguments."""
    if not traced.writes_arguments:
        yield from (tensor for tensor, is_written in zip(static, traced.written, strict=False) if is_written)
        return
    yield from (local_of(request.state[index].tensor) for index in traced.state)
    yield from (entry.tensor for flag in traced.flags for entry in flag.entries)


def _device_scalar(entry: Lifted, device: torch.device) -> DeviceScalar:
    read = Location(TensorItem(entry.tensor), "value", entry.name).reader()
    return DeviceScalar(read, Slot(entry.tensor.detach().to(device), entry.tensor.item()))


def _counters(found: Found) -> Iterator[Location]:
    """Places of numbers that code may change by ``+=`` and the like."""
    names = {name for code in found.codes for name in counted_in(code)}
    own = {*map(id, _holders_of_optimizers(found))}
    places = [location for location in found.places if id(location.holder) not in own]
    for prefix, root in found.modules:
        for name, module in root.named_modules(prefix=prefix):
            places += (Location(vars(module), key, f"{name}.{key}") for key in names.intersection(vars(module)))
    return (place for place in places if name_of(place) in names and is_number(place.get()))


def _holders_of_optimizers(found: Found) -> list[Any]:
    """What keeps numbers of optimizers and scalers, which are lifted otherwise."""
    owners: list[Any] = [vars(owner) for _, owner in (*found.optimizers, *found.scalers)]
    for _, optimizer in found.optimizers:
        owners += (optimizer.defaults, *optimizer.param_groups, *optimizer.state.values())
    return owners


def _name_number(found: Found, number: NumberInput) -> str:
    names = (name for name, optimizer in found.optimizers if optimizer is number.optimizer)
    return number.label if number.is_users else f"{next(names)}.{number.label}"
