"""From a call to what must be traced, and from the trace to a graph that can be built and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream.capture.guards import native
from millstream.capture.guards.guards import make_guards
from millstream.capture.state.discover import Found
from millstream.capture.state.lift import Lifted, find_mirrored, lift
from millstream.capture.state.signature import RESOLVE_REMEDY, Leaf, Reference, Structure, is_lazy_view, walk_arguments
from millstream.capture.step.graph import HostTensor, Memory, Slot, StepGraph, adopt, is_alike
from millstream.capture.step.request import Gradient, Request, Traced
from millstream.capture.trace.patches.optimizers import CountPlace, NumberPlace, count_places, device_of, number_places
from millstream.errors import CaptureError


@dataclass
class Call:
    """One call of a step.

    Attributes:
        key: What it has in common with the calls that the same graph may serve.
        structure: Structure of ``(args, kwargs)``.
        arguments: Its tensors.
        args: Positional arguments as given.
        kwargs: Keyword arguments as given.
        parameters: Names of the function's parameters.
    """

    key: Any
    structure: Structure
    arguments: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: Sequence[str]

    @property
    def signature(self) -> dict[str, str]:
        """The tensors by name, for people."""
        parts = walk_arguments(self.structure, self.parameters)
        names = [name for name, part in parts if isinstance(part, Leaf)]
        return {
            name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for name, tensor in zip(names, self.arguments, strict=True)
        }

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Names and objects among the arguments that are neither tensors nor plain values."""
        for name, part in walk_arguments(self.structure, self.parameters):
            if isinstance(part, Reference):
                yield name, part.target


@dataclass
class Workshop:
    """What the graphs of one step share.

    Attributes:
        slots: Tensors for the numbers of optimizers.
        cycled: Hyperparameters that were seen to change: graphs read them at run time.
        changing: Places that were seen to hold another tensor than before (id of the holder, key) and their holders:
            graphs read what is there in each call.
        homes: For a tensor, by id, itself and the gradient that graphs read and write.
        counted: Keys under which optimizers were seen to count their steps, in their state or as attributes.
    """

    slots: dict[NumberPlace | CountPlace, Slot] = field(default_factory=dict)
    cycled: set[NumberPlace] = field(default_factory=set)
    counted: set[tuple[Optimizer, str]] = field(default_factory=set)
    changing: dict[tuple[int, Any], Any] = field(default_factory=dict)
    homes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def make_request(self, function: Any, call: Call, roots: list[tuple[str, Any]], found: Found) -> Request:
        """Say what to trace.

        Raises:
            CaptureError: Arguments are not apart, or something cannot be lifted.
        """
        arguments = {id(argument) for argument in call.arguments}
        if len(arguments) != len(call.arguments):
            raise CaptureError("One tensor is passed as two arguments.", remedy="Pass it once, or pass a clone.")
        if torch.is_grad_enabled() and any(
            argument.requires_grad and not argument.is_leaf for argument in call.arguments
        ):
            raise CaptureError(
                "An argument was computed with gradients, which would have to reach beyond the step.",
                remedy="Compute it inside of the step, or detach it.",
            )
        if any(argument.layout is not torch.strided for argument in call.arguments):
            raise CaptureError("An argument is a sparse or nested tensor.", remedy="Pass dense tensors.")
        if any(map(is_lazy_view, call.arguments)):
            raise CaptureError("An argument is a conjugated or negated view.", remedy=RESOLVE_REMEDY)
        state = [entry for entry in lift(found) if id(entry.tensor) not in arguments]
        numbers: list[NumberPlace | CountPlace] = []
        for _, optimizer in found.optimizers:
            numbers += (place for place in number_places(optimizer) if place.key == "lr" or place in self.cycled)
            for key in sorted(key for counting, key in self.counted if counting is optimizer):
                numbers += count_places(optimizer, key)
        return Request(
            function=function,
            structure=call.structure,
            arguments=call.arguments,
            roots=roots,
            found=found,
            state=state,
            gradients=[
                Gradient(entry.name, entry.tensor, entry.tensor.grad)
                for entry in state
                if (entry.tensor.requires_grad or entry.tensor.grad is not None)
            ],
            numbers=numbers,
            changing=self.changing,
            mirrored=find_mirrored(state),
        )

    def note_counts(self, found: Found, changed: Iterable[tuple[Any, str]]) -> None:
        """Let graphs read numbers that the step itself changes.

        Args:
            found: What the step reaches.
            changed: A parameter group, an entry of the state or an optimizer's attributes, and the number's key.
        """
        for holder, key in changed:
            for _, optimizer in found.optimizers:
                if any(entry is holder for entry in (vars(optimizer), *optimizer.state.values())):
                    self.counted.add((optimizer, key))
                for number, group in enumerate(optimizer.param_groups):
                    if group is holder:
                        self.cycled.add(NumberPlace(optimizer, number, key, None))

    def assemble(self, call: Call, request: Request, traced: Traced, seconds: float) -> StepGraph:
        """Put real tensors to the inputs of a traced graph.

        Raises:
            CaptureError: An argument shares memory with another or with state, and one of them is written.
        """
        static: list[Tensor] = []
        names: list[str] = []
        mirrors: list[Slot] = []
        for index in traced.state:
            entry = request.state[index]
            names.append(entry.name)
            if index in request.mirrored:
                mirrors.append(self._mirror(entry, request.mirrored[index]))
                static.append(mirrors[-1].tensor)
            else:
                static.append(entry.tensor.detach())
        written_state = Memory(tensor for tensor, is_written in zip(static, traced.written, strict=False) if is_written)
        given = [*call.arguments, *(request.state[index].tensor for index, *_ in traced.replaced)]
        if not written_state.is_apart_from(given, among_each_other=traced.writes_arguments):
            raise CaptureError(
                "An argument shares memory with state that the step writes, or with another argument, one written.",
                remedy="Pass a clone of it.",
            )
        # From here on nothing fails: only now may gradients be moved to where graphs have them.
        before = self._settle_gradients(request.gradients)
        after = [
            (old if old is not None else self._home(gradient)) if is_left else None
            for gradient, old, is_left in zip(request.gradients, before, traced.left, strict=True)
        ]
        for index in traced.gradients:
            gradient, old = request.gradients[index], before[index]
            names.append(f"{gradient.name}.grad")
            static.append(old if old is not None else self._home(gradient))
        homes = static[len(traced.state) :]
        for index in traced.numbers:
            names.append(_name_number(request.found, request.numbers[index]))
            static.append(self._slot(request.numbers[index]).tensor)
        parameters = [
            request.state[index].tensor
            for index, is_written in zip(traced.state, traced.written, strict=False)
            if is_written and isinstance(request.state[index].tensor, nn.Parameter)
        ]
        guards = make_guards(request, traced, before, homes)
        if any(tensor.device.type in native.DEVICES for tensor in guards.watched):
            guards.quicken(parameters)
        return StepGraph(
            signature=call.signature,
            state_names=names,
            gm=traced.gm,
            trace_seconds=seconds,
            key=call.key,
            guards=guards,
            static=static,
            arguments=traced.arguments,
            places=[(holder, key) for _, holder, key in traced.replaced],
            slots=[self._slot(place) for place in request.numbers],
            mirrors=mirrors,
            numbers=[place.get() for place in request.numbers],
            questions=traced.questions,
            left=[
                (gradient.parameter, new)
                for gradient, old, new in zip(request.gradients, before, after, strict=True)
                if new is not old
            ],
            structure=traced.structure,
            outputs=traced.outputs,
            effects=traced.effects,
            written=[tensor for tensor, is_written in zip(static, traced.written, strict=False) if is_written],
            parameters=parameters,
            written_state=written_state,
            writes_arguments=traced.writes_arguments,
        )

    def forget(self, graphs: Iterable[StepGraph]) -> None:
        """Keep only the gradients that ``graphs`` use."""
        used = {id(tensor) for graph in graphs for tensor in graph.guards.watched}
        self.homes = {key: home for key, home in self.homes.items() if key in used}

    def _settle_gradients(self, gradients: Sequence[Gradient]) -> list[Tensor | None]:
        """Bring the gradients that there are to where graphs have them, and return those places."""
        owners = {id(home): tensor for tensor, home in self.homes.values()}
        strays: list[tuple[Tensor, Tensor]] = []
        for gradient in gradients:
            tensor, before = gradient.parameter, gradient.before
            if before is None:
                continue
            known = self.homes.get(id(tensor))
            if known is None or not is_alike(before, known[1]):
                is_anothers = owners.get(id(before), tensor) is not tensor
                known = self.homes[id(tensor)] = (tensor, torch.empty_like(before) if is_anothers else before)
            if known[1] is not before:
                strays.append(known)
        adopt(strays)
        return [gradient.parameter.grad for gradient in gradients]

    def _home(self, gradient: Gradient) -> Tensor:
        """The place for a gradient where there is none yet."""
        tensor = gradient.parameter
        known = self.homes.get(id(tensor))
        if known is None or known[1].shape != tensor.shape or known[1].dtype != tensor.dtype:
            known = self.homes[id(tensor)] = (tensor, torch.zeros_like(tensor, requires_grad=False))
        return known[1]

    def _slot(self, place: NumberPlace | CountPlace) -> Slot:
        if place not in self.slots:
            value = place.get()
            tensor = torch.full((), value, dtype=torch.float64, device=device_of(place.optimizer, place.group))
            self.slots[place] = Slot(place, tensor, value)
        return self.slots[place]

    def _mirror(self, entry: Lifted, device: torch.device) -> Slot:
        value = entry.tensor.item()
        return Slot(HostTensor(entry.name, entry.tensor), entry.tensor.detach().to(device), value)


def _name_number(found: Found, place: NumberPlace | CountPlace) -> str:
    name = next(name for name, optimizer in found.optimizers if optimizer is place.optimizer)
    item = "" if place.item is None else f"[{place.item}]"
    return f"{name}.{place.key}{item}[{place.group}]"
