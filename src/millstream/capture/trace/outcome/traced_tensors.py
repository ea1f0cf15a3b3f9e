"""Tensors that a traced step leaves behind or returns: gradients, state that it replaced, results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.scaler import is_idle
from millstream._torch.tensors import FakeTensor, is_same_view, storage_id
from millstream._torch.tracing import graph_being_traced
from millstream.capture.effects.host_effects import Effects, EffectWrite, Output
from millstream.capture.record.location import Location
from millstream.capture.record.paths import places_of
from millstream.capture.record.recorder import Recorder as Record
from millstream.capture.state.lift import Lifted
from millstream.capture.state.objects import objects_of_batch
from millstream.capture.state.snapshot import Change
from millstream.capture.trace.numbers.scalars import is_known_later, is_tensor
from millstream.capture.trace.outcome.changes import needs_gradient
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder, open_structure
from millstream.capture.trace.request import Request
from millstream.capture.trace.twins import fake_of, is_traced, real_of
from millstream.capture.trace.watches.given_tensors import ForeignTensor, fits
from millstream.errors import CaptureError
from millstream.tree.spec import Reference, Structure, walk

SIDE_EFFECT_REMEDY = "A captured step repeats tensor operations only: move this out of the step."

MOST_SEARCHED = 10_000
"""Objects of a result that are looked into: of many more it can only be said that they are the user's own."""


@dataclass
class Leaving:
    """Makes results of the graph of everything that a call leaves behind.

    Attributes:
        request: What is traced.
        recorder: What the step does besides; says how numbers in the result are made.
        record: What it reads and writes.
        report: Raises an error that counts also if the step catches it.
        grad_buffers: An input for each gradient: the one there is, or memory for one that the step may leave.
        moved: By identity, inputs whose ``.data`` was assigned, and what has the memory that they had.
        memory: Storages of the inputs.
        copies: What is to be copied at the end, target first.
        left: Of each gradient, whether there is one at the end.
        kept: Of each gradient, whether that is the one that there was, with other values.
        replaced: State that is read from its place in each call, by index.
        stored: By storage, where the step puts tensors of the graph.
        num_tensors: Results of the graph that are returned or stored; those that effects read come after them.
    """

    request: Request
    recorder: EffectRecorder
    record: Record
    report: Callable[[Exception], NoReturn]
    grad_buffers: list[Tensor] = field(init=False)
    moved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    memory: set[int] = field(default_factory=set)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    replaced: dict[int, Location] = field(default_factory=dict)
    stored: dict[int, str] = field(default_factory=dict)
    structure: Structure | None = None
    outputs: list[Output] = field(default_factory=list)
    num_tensors: int = 0
    effects: Effects = field(default_factory=Effects)

    def __post_init__(self) -> None:
        self.grad_buffers = [
            torch.empty_like(fake_of(gradient.parameter), requires_grad=False)
            if gradient.before is None
            else gradient.before
            for gradient in self.request.gradients
        ]

    def begin(self, moved: dict[int, tuple[Tensor, Tensor]]) -> None:
        """The step is about to run; ``moved`` will be noted."""
        self.moved, self.memory = moved, set(map(storage_id, self._inputs()))
        self._attributes = [[dict(vars(each)) for each in _pair(entry)] for entry in self.request.state]

    def check_attributes(self) -> None:
        """Refuse attributes that the step has put on tensors of the user's, or on their twins."""
        for entry, pair in zip(self.request.state, self._attributes, strict=True):
            for tensor, before in zip(_pair(entry), pair, strict=True):
                for key, value in vars(tensor).items():
                    is_pytorchs = key.endswith(("_memo", "_memo_vc"))  # what a fake tensor knows of itself
                    if before.get(key, before) is not value and not is_pytorchs:
                        raise CaptureError(
                            f"The step puts an attribute on {entry.name}, {key}, which a graph would not do again.",
                            remedy="Keep it in a dict, by the tensor's name.",
                        )

    def keep_data(self) -> None:
        """Note what was assigned to the ``.data`` of inputs."""
        taken = set(self.memory)
        for tensor in self._inputs():
            before = self._memory_of(tensor)
            if is_same_view(tensor, before):
                continue
            if storage_id(tensor) in taken:
                raise CaptureError(
                    "The step assigns to .data what shares memory with state or with an argument.",
                    remedy="Assign a clone of it, or use copy_().",
                )
            taken.add(storage_id(tensor))
            self.copies.append((before, tensor))

    def keep_gradients(self) -> None:
        gradients = [gradient.parameter.grad for gradient in self.request.gradients]
        self.left += [now is not None for now in gradients]
        self.kept += [now is each.before for each, now in zip(self.request.gradients, gradients, strict=True)]
        kept = [buffer for now, buffer in zip(gradients, self.grad_buffers, strict=True) if now is buffer]
        taken = {storage_id(tensor) for tensor in (*kept, *(entry.tensor for entry in self.request.state))}
        for gradient, now, buffer in zip(self.request.gradients, gradients, self.grad_buffers, strict=True):
            if now is None or now is buffer:
                continue
            if not fits(now, buffer):
                raise CaptureError(
                    f"The gradient of {gradient.name} has another shape, dtype or layout than it had.",
                    remedy="Keep gradients dense and in the parameter's dtype.",
                )
            if storage_id(now) in taken:
                raise CaptureError(
                    f"The gradient of {gradient.name} shares memory with state or with another gradient.",
                    remedy="Give it memory of its own, with clone().",
                )
            taken.add(storage_id(now))
            self.copies.append((buffer, now))

    def take_outputs(self, result: Any, stored: list[Change]) -> list[Tensor]:
        parts: list[Any] = []
        state = {id(entry.tensor) for entry in self.request.state}
        self.structure = open_structure(result, parts, opened=self._classes_made(result, state))
        _check_returned(self.structure, state)
        self._note_replaced(stored, parts)
        own = self._own_outputs()
        taken = {*self.memory, *(storage_id(each.tensor) for each in self.recorder.questions.inputs)}
        results: list[Tensor] = []
        index_of: dict[int, int] = {}

        def take(leaf: Tensor, own: dict[int, Output] = own) -> Output:
            leaf = real_of(leaf)
            if id(leaf) in own:
                return own[id(leaf)]
            if not is_traced(leaf):
                self.report(ForeignTensor(leaf, ""))
            if id(leaf) not in index_of:
                plain = leaf.detach()
                if storage_id(plain) in taken:
                    if storage_id(plain) in self.recorder.passed:
                        raise CaptureError(
                            "The step passes tensors that share memory across the edge of an eager_region.",
                            remedy="Pass a clone.",
                        )
                    plain = plain.clone()
                taken.add(storage_id(plain))
                index_of[id(leaf)] = len(results)
                results.append(plain)
            return Output("graph", index_of[id(leaf)])

        returned = own | self._gradients_kept()
        self.outputs += (take(part, returned) if is_tensor(part) else self.recorder.host_output(part) for part in parts)
        program = self.recorder.program
        for change in stored:
            if self.recorder.is_part and change.after.requires_grad and not change.after.is_leaf:
                raise CaptureError(
                    f"The step stores a tensor with gradients in {change.location}, and an eager_region follows.",
                    remedy="Detach it.",
                )
            output = take(change.after)
            program.append(EffectWrite(change.location, output))
            if output.kind == "graph":
                self.stored[storage_id(change.after)] = str(change.location)
        self.num_tensors = len(results)
        self.effects = self.recorder.finish(self.outputs, results)
        return results

    def _classes_made(self, result: Any, state: Container[int]) -> set[type]:
        """Classes of the objects with new tensors in a result; none where the user's own are among these."""
        made = [each for each in objects_of_batch(result) if _holds_new_tensors(each, state)]
        return {*map(type, made)} if not any(map(self.record.origin_of, made)) else set()

    def _own_outputs(self) -> dict[int, Output]:
        """By id, arguments and state, which are returned and stored as they are."""
        assigned = {id(target) for target, _ in self.copies}
        tensors = (entry.tensor for entry in self.request.state)
        own = {id(tensor): Output("object", value=tensor) for tensor in tensors if id(tensor) not in assigned}
        given = [*self.request.arguments, *(self.request.state[index].tensor for index in self.replaced)]
        return own | {id(tensor): Output("argument", index) for index, tensor in enumerate(given)}

    def _gradients_kept(self) -> dict[int, Output]:
        """By id, gradients that are the same tensors before and after a call, which are returned as they are.

        What crosses the edge of an eager region is a tensor of its own.
        """
        if self.recorder.is_part:
            return {}
        pairs = zip(self.request.gradients, self.kept, strict=True)
        kept = (each for each, is_kept in pairs if is_kept and each.before is not None)
        return {id(each.before): Output("gradient", value=each.parameter) for each in kept}

    def copy_back(self) -> None:
        """Do all copies as if at once: what one of them overwrites, another may read."""
        values = [value.clone() if storage_id(value) in self.memory else value for _, value in self.copies]
        for (target, _), value in zip(self.copies, values, strict=True):
            self._memory_of(target).copy_(value)

    def _note_replaced(self, stored: list[Change], parts: list[Any]) -> None:
        """Find state that the step uses and in whose place it, or the user between calls, puts other tensors.

        Such state is read from its place in each call, like an argument: to copy the new tensor into the old one would
        change what the user may keep by another name. Where several places hold one tensor, nobody can tell by which
        it was read; then the graph is for that very tensor.
        """
        placeholders = graph_being_traced().find_nodes(op="placeholder")
        returned = {*map(id, parts), *(id(change.after) for change in stored)}
        replaced = {id(change.before) for change in stored}
        for index, entry in enumerate(self.request.state):
            tensor = id(entry.tensor)
            if not placeholders[index].users and tensor not in returned:
                continue
            is_replaced = tensor in replaced
            if is_replaced and entry.required_grad:
                raise needs_gradient(entry.name)
            if is_replaced and index in self.request.host_scalars:
                raise writes_host(entry)
            if entry.required_grad or index in self.request.host_scalars:
                continue
            if not is_replaced and not self.request.changing:
                continue
            location, *others = {*entry.locations, *places_of(entry.tensor, self.record)} or (None,)
            if location is not None and not others and (is_replaced or location in self.request.changing):
                self.replaced[index] = location

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """Return what has the memory that ``tensor`` had when the step began."""
        return self.moved.get(id(tensor), (tensor, tensor))[1]

    def _inputs(self) -> Iterator[Tensor]:
        yield from (entry.tensor for entry in self.request.state)
        yield from self.grad_buffers
        yield from self.request.arguments


def _pair(entry: Lifted) -> tuple[Tensor, Tensor]:
    """Return what the step has, and what PyTorch has for it."""
    return entry.tensor, fake_of(entry.tensor)


def _check_returned(structure: Structure, state: Container[int]) -> None:
    """Refuse objects with tensors inside that nobody could put together again.

    Args:
        structure: Of the result.
        state: By identity, tensors that are the user's own.
    """
    for name, part in walk(structure, "the result"):
        if not isinstance(part, Reference):
            continue
        if isinstance(part.target, Iterator):
            raise CaptureError(f"{name} is an iterator, which gives its items once.", remedy="Return a list.")
        if _holds_new_tensors(part.target, state):
            kind = (
                "new Parameter"
                if isinstance(part.target, Tensor)
                else f"{type(part.target).__name__} with tensors inside"
            )
            raise CaptureError(f"{name} is a {kind}.", remedy="Return tensors in tuples, lists, dicts or dataclasses.")


def _holds_new_tensors(value: Any, state: Container[int]) -> bool:
    """Return whether tensors, numbers or text made while tracing can be reached from a value without a call."""
    waiting, seen = [value], dict[int, Any]()
    while waiting and len(seen) <= MOST_SEARCHED:
        value = waiting.pop()
        if is_known_later(value) or (isinstance(value, FakeTensor) and id(value) not in state):
            return True
        if id(value) not in seen and not isinstance(value, _CLOSED):
            seen[id(value)] = value
            # A function leads to all of its globals, too.
            waiting += (value.__closure__ or ()) if isinstance(value, FunctionType) else gc.get_referents(value)
    return False


_CLOSED = (Tensor, nn.Module, Optimizer, type, ModuleType, CodeType)


def writes_host(entry: Lifted) -> CaptureError:
    """The refusal of a write to the host."""
    return CaptureError(
        f"The step writes {entry.name}, a number on the host, from the device.",
        remedy="Keep that tensor on the device.",
    )


def check_left(request: Request, *, reads_gradient: bool) -> None:
    """Refuse what a call would leave unfinished or changed without a graph noticing.

    Args:
        request: What is traced.
        reads_gradient: Whether the step has read that of an argument.
    """
    for name, scaler in request.found.scalers:
        if not is_idle(scaler):
            raise CaptureError(f"The step ends without {name}.update().", remedy="Call it in the same step.")
    for entry in request.state:
        if entry.tensor.requires_grad != entry.required_grad:
            raise CaptureError(f"The step leaves {entry.name}.requires_grad changed.", remedy=SIDE_EFFECT_REMEDY)
    if reads_gradient:
        raise CaptureError(
            "The step reads the gradient of one of its arguments.", remedy="Pass the gradient as an argument, too."
        )
    for argument in request.arguments:
        if argument.requires_grad and argument.is_leaf and argument.grad is not None:
            raise CaptureError(
                "The step leaves a gradient on one of its arguments.",
                remedy="Use torch.autograd.grad and return the gradient.",
            )
