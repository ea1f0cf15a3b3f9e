"""Run the user's step once on fake tensors and record it as one flat graph of aten operators.

**Contract**
- The user's tensors, optimizers, modules, ``.grad``, random state and every other Python object found are afterwards
  exactly as before, whether tracing succeeds or fails.
- The graph writes state, numbers and gradients through its inputs and returns the tensors of the result; its results
  share no memory with its inputs or with each other.
- What the graph could not repeat on every call is refused with a ``CaptureError``.

**Steps**
1. Make all state, gradients and arguments fake; put scalars for the numbers.
2. Run the function; add copies for state it replaced and for gradients it left; detach its results.
3. Clean the graph and drop the inputs it does not use.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from millstream.capture import torch_private
from millstream.capture.caches import caches_unfilled
from millstream.capture.checkpointing import RandomRecords, checkpoints_reuse_randoms
from millstream.capture.clean import (
    drop_idle_nodes,
    drop_unused_inputs,
    hoist_transfers,
    move_constants,
    written_storages,
)
from millstream.capture.discover import MISSING
from millstream.capture.lines import place_of
from millstream.capture.modes import ForeignTensor, FunctionWatch, OperatorWatch
from millstream.capture.optimizers import device_of, schedulers_are_refused, traceable
from millstream.capture.python_state import (
    Change,
    Kind,
    Snapshot,
    record_module_reads,
    selects_behaviour,
)
from millstream.capture.randomness import RandomState, other_generators_refused
from millstream.capture.request import Output, Request, Traced
from millstream.capture.scalars import GraphScalar, Questions
from millstream.capture.scaler import is_idle, steps_are_masked
from millstream.capture.signature import LEAF, Container, Reference, Structure, put_together, take_apart, walk
from millstream.capture.state import become_fake
from millstream.errors import CaptureError

SIDE_EFFECT_REMEDY = "A captured step repeats tensor operations only: move this out of the step."


class StateMissing(Exception):  # noqa: N818 - a message to the step, which runs eagerly this time
    """State would be created now, of an optimizer or in a cache: only an eager call can give it values."""


class FoundLate(Exception):  # noqa: N818 - a message to the step, which lifts the objects and traces again
    """Objects that discovery missed showed up while tracing."""

    def __init__(self, name: str, value: Any, where: str) -> None:
        super().__init__(name)
        self.name, self.value, self.where = name, value, where


def trace_step(request: Request) -> Traced:
    """Record the step of ``request``.

    Raises:
        CaptureError: It cannot be captured.
        StateMissing: An eager call must come first.
        FoundLate: ``request`` lacks an object.
    """
    return _Tracer(request).trace()


@dataclass
class _Tracer:
    request: Request
    mode: torch_private.FakeTensorMode = field(default_factory=torch_private.FakeTensorMode)
    questions: Questions = field(default_factory=Questions)
    stepped: list[Optimizer] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    effects: list[tuple[Any, Any, Output]] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    structure: Structure | None = None
    failure: Exception | None = None

    def trace(self) -> Traced:
        request = self.request
        state = [entry.tensor for entry in request.state]
        before = [gradient.before for gradient in request.gradients if gradient.before is not None]
        random_state = RandomState()
        torch.clear_autocast_cache()  # it holds on to parameters
        try:
            with (
                torch_private.no_compiled_modules(),
                torch_private.plain_recurrence(),
                become_fake([*state, *before, *request.arguments], self.mode, request.mirrored),
                self.mode,
                self._numbers_replaced() as numbers,
                traceable([optimizer for _, optimizer in request.found.optimizers]),
            ):
                self.snapshot = Snapshot(request.found)
                with (
                    record_module_reads(self._on_forward) as reads,
                    self._optimizers_watched(),
                    caches_unfilled(request.found.cached, lambda name: self._report(StateMissing(f"{name}'s cache"))),
                ):
                    self.homes = self._make_homes()
                    inputs = [*state, *self.homes, *numbers, *request.arguments]
                    try:
                        gm = self._record(inputs)
                    finally:
                        self.snapshot.restore()
        except (CaptureError, StateMissing, FoundLate):
            raise
        except ForeignTensor as foreign:
            if not foreign.tensor.is_leaf:
                raise CaptureError(
                    "The step uses a tensor that was computed outside of it, with gradients.",
                    where=foreign.where,
                    remedy="Compute it inside of the step, or detach it.",
                ) from None
            raise FoundLate("a tensor", foreign.tensor, foreign.where) from None
        except Exception as error:
            raise CaptureError(
                f"Tracing failed: {type(error).__name__}: {error}".splitlines()[0],
                where=place_of(error),
                remedy="If the line also fails without ms.step, correct it; otherwise keep it out of the step.",
            ) from error
        finally:
            used = random_state.what_changed()
            if used or sys.exc_info()[0] is not None:
                random_state.restore()
            torch.clear_autocast_cache()
        if used:
            raise CaptureError(f"The step draws from {used}, which a graph cannot repeat.", remedy=SIDE_EFFECT_REMEDY)
        return self._finish(gm, reads)

    def _record(self, inputs: list[Tensor]) -> fx.GraphModule:
        randoms = RandomRecords()
        watched = {id(entry.tensor) for entry in self.request.state}

        def run_step() -> Any:
            args, kwargs = put_together(self.request.structure, iter(self.request.arguments).__next__)
            return self.request.function(*args, **kwargs)

        def body() -> Sequence[Tensor]:
            functions = FunctionWatch(self._note_failure, watched)
            with (
                OperatorWatch(self._note_failure, functions, randoms),
                functions,
                functions.from_numpy_refused(),
                checkpoints_reuse_randoms(randoms),
                steps_are_masked(),
            ):
                result = run_step()
                self._raise_failure()
                with torch.no_grad():
                    stored = self._keep_changes()
                    self._keep_gradients()
                    return self._take_outputs(result, stored)

        try:
            with torch_private.pretend_compiling():
                return torch_private.trace_aten(body, inputs)
        except Exception:
            self._raise_failure()
            raise

    def _note_failure(self, error: Exception) -> None:
        self.failure = self.failure or error

    def _raise_failure(self) -> None:
        """The first refusal counts, also when the user's function caught it and went on."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def _numbers_replaced(self) -> Iterator[list[Tensor]]:
        """Put graph scalars in the places of the numbers; yields the tensors that they read."""
        places = self.request.numbers
        values = [place.get() for place in places]
        tensors = [
            torch.empty((), dtype=torch.float64, device=device_of(place.optimizer, place.group)) for place in places
        ]
        try:
            for index, (place, value, tensor) in enumerate(zip(places, values, tensors, strict=True)):
                place.set(GraphScalar(value, tensor, _Nth(index), self.questions))
            yield tensors
        finally:
            for place, value in zip(places, values, strict=True):
                place.set(value)

    def _on_forward(self, module: nn.Module) -> None:
        """Stop at a module that the request does not have."""
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and torch_private.is_real(tensor) for tensor in own):
            self._report(FoundLate(type(module).__name__, module, ""))

    @contextlib.contextmanager
    def _optimizers_watched(self) -> Iterator[None]:
        """Note which optimizers step; stop at one that the request does not have."""
        known = {id(optimizer) for _, optimizer in self.request.found.optimizers}

        thread = threading.get_ident()

        def on_step(optimizer: Optimizer, *_: Any) -> None:
            if threading.get_ident() != thread:
                return
            if id(optimizer) not in known:
                self._report(FoundLate(type(optimizer).__name__, optimizer, ""))
            if optimizer not in self.stepped:
                self.stepped.append(optimizer)

        handle = register_optimizer_step_pre_hook(on_step)
        try:
            with schedulers_are_refused(self._note_failure), other_generators_refused(self._note_failure):
                yield
        finally:
            handle.remove()

    def _report(self, error: Exception) -> NoReturn:
        self._note_failure(error)
        raise error

    def _make_homes(self) -> list[Tensor]:
        """One input for each gradient: the one there is, or memory for one that the step may leave."""
        return [
            torch.empty_like(gradient.parameter, requires_grad=False) if gradient.before is None else gradient.before
            for gradient in self.request.gradients
        ]

    def _keep_changes(self) -> list[tuple[Any, Any, Tensor]]:
        """Copy new tensors into the state whose place they took; refuse what a graph cannot do to Python objects.

        Returns:
            Other tensors that the function stored: holder, key and tensor.
        """
        copied = self._state_to_keep()
        stored: list[tuple[Any, Any, Tensor]] = []
        for change in self.snapshot.changes():
            before, after = change.before, change.after
            is_state = change.kind is Kind.STATE or id(before) in copied
            if is_state and isinstance(before, Tensor) and _fits(after, before):
                before.copy_(after)
            elif change.kind is Kind.STATE:
                raise StateMissing(change.name)
            elif change.kind is Kind.GROUP:
                raise CaptureError(
                    f"The step changes {change.name} from {before} to {after}.",
                    remedy="Change it outside of the step.",
                )
            elif change.kind is Kind.MODULE and change.key == "training":
                self.effects.append((change.holder, change.key, Output("object", value=after)))
            elif isinstance(after, torch_private.FakeTensor) and change.is_entry:
                stored.append((change.holder, change.key, after))
            elif change.kind not in (Kind.OPTIMIZER, Kind.SCALER):
                raise _side_effect(change)
        for name, scaler in self.request.found.scalers:
            if not is_idle(scaler):
                raise CaptureError(f"The step ends without {name}.update().", remedy="Call it in the same step.")
        for entry in self.request.state:
            if entry.tensor.requires_grad != entry.required_grad:
                raise CaptureError(f"The step leaves {entry.name}.requires_grad changed.", remedy=SIDE_EFFECT_REMEDY)
        return stored

    def _state_to_keep(self) -> set[int]:
        """Ids of state tensors whose object must stay: those with a registered place, and those that the step reads.

        Any other tensor that the function replaces (``self.last = loss``) is a result rather than state.
        """
        placeholders = torch_private.graph_being_traced().find_nodes(op="placeholder")
        return {
            id(entry.tensor)
            for entry, node in zip(self.request.state, placeholders, strict=False)
            if entry.places or node.users
        }

    def _keep_gradients(self) -> None:
        for gradient, home in zip(self.request.gradients, self.homes, strict=True):
            now = gradient.parameter.grad
            self.left.append(now is not None)
            if now is not None and now is not home:
                if not _fits(now, home):
                    raise CaptureError(
                        f"The gradient of {gradient.name} has another shape, dtype or layout than it had.",
                        remedy="Keep gradients dense and in the parameter's dtype.",
                    )
                home.copy_(now)
        for argument in self.request.arguments:
            if argument.requires_grad and argument.is_leaf and argument.grad is not None:
                raise CaptureError(
                    "The step leaves a gradient on one of its arguments.",
                    remedy="Use torch.autograd.grad and return the gradient.",
                )

    def _take_outputs(self, result: Any, stored: list[tuple[Any, Any, Tensor]]) -> list[Tensor]:
        leaves: list[Tensor] = []
        structure = take_apart(result, leaves)
        self.structure = _make_numbers_leaves(structure)
        _check_returned(self.structure)
        arguments = {id(tensor): index for index, tensor in enumerate(self.request.arguments)}
        objects = {id(entry.tensor) for entry in self.request.state}
        taken = {torch_private.storage_id(tensor) for tensor in self._inputs()}
        results: list[Tensor] = []
        index_of: dict[int, int] = {}

        def take(leaf: Tensor) -> Output:
            if id(leaf) in arguments:
                return Output("argument", arguments[id(leaf)])
            if id(leaf) in objects:
                return Output("object", value=leaf)
            if not isinstance(leaf, torch_private.FakeTensor):
                self._report(ForeignTensor(leaf, ""))
            if id(leaf) not in index_of:
                plain = leaf.detach()
                if torch_private.storage_id(plain) in taken:
                    plain = plain.clone()
                taken.add(torch_private.storage_id(plain))
                index_of[id(leaf)] = len(results)
                results.append(plain)
            return Output("graph", index_of[id(leaf)])

        tensors = iter(leaves)
        for _, part in walk(structure, ""):
            if part is LEAF:
                self.outputs.append(take(next(tensors)))
            elif _is_graph_scalar(part):
                self.outputs.append(Output("number", value=part.target.of))
        self.effects += ((holder, key, take(tensor)) for holder, key, tensor in stored)
        return results

    def _inputs(self) -> Iterator[Tensor]:
        yield from (entry.tensor for entry in self.request.state)
        yield from self.homes
        yield from self.request.arguments

    def _finish(self, gm: fx.GraphModule, reads: dict[tuple[int, str], tuple[nn.Module, str]]) -> Traced:
        assert self.structure is not None
        drop_idle_nodes(gm)
        move_constants(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        sizes = [len(part) for part in (self.request.state, self.homes, self.request.numbers, self.request.arguments)]
        starts = [sum(sizes[:part]) for part in range(4)]
        transfers = hoist_transfers(gm, placeholders[starts[3] :])
        written = written_storages(gm)
        is_written = [torch_private.storage_id(node.meta["val"]) in written for node in placeholders]
        for index in self.request.mirrored:
            if is_written[index]:
                raise CaptureError(
                    f"The step writes {self.request.state[index].name}, a number on the host, from the device.",
                    remedy="Keep that tensor on the device.",
                )
        devices = [transfers.get(node) for node in placeholders]
        kept = drop_unused_inputs(gm)
        gm.recompile()
        state, gradients, numbers, arguments = (
            [position - start for position in kept if start <= position < start + size]
            for start, size in zip(starts, sizes, strict=True)
        )
        return Traced(
            gm=gm,
            state=state,
            gradients=gradients,
            numbers=numbers,
            arguments=[(index, devices[starts[3] + index]) for index in arguments],
            written=[is_written[position] for position in kept],
            left=self.left,
            structure=self.structure,
            outputs=self.outputs,
            questions=self.questions,
            reads=[
                (vars(module), name, vars(module).get(name, MISSING))
                for module, name in reads.values()
                if selects_behaviour(module, name)
            ],
            effects=self.effects,
            optimizers=self.stepped,
            writes_arguments=any(is_written[starts[3] :]),
        )


@dataclass(frozen=True, slots=True)
class _Nth:
    index: int

    def __call__(self, numbers: Sequence[float]) -> float:
        return numbers[self.index]


def _fits(new: Any, old: Tensor) -> bool:
    return isinstance(new, Tensor) and new.shape == old.shape and new.dtype == old.dtype and new.device == old.device


def _is_graph_scalar(part: Structure) -> TypeGuard[Reference]:
    return isinstance(part, Reference) and isinstance(part.target, GraphScalar)


def _make_numbers_leaves(structure: Structure) -> Structure:
    """Let the places of graph scalars be filled in each call."""
    if _is_graph_scalar(structure):
        return LEAF
    if isinstance(structure, Container):
        return replace(structure, children=tuple(map(_make_numbers_leaves, structure.children)))
    return structure


def _check_returned(structure: Structure) -> None:
    """Refuse objects with tensors inside that nobody could put together again."""
    for name, part in walk(structure, "the result"):
        if not isinstance(part, Reference) or isinstance(part.target, nn.Module | Optimizer | Tensor):
            continue
        if any(isinstance(value, torch_private.FakeTensor) for value in getattr(part.target, "__dict__", {}).values()):
            raise CaptureError(
                f"{name} is a {type(part.target).__name__} with tensors inside.",
                remedy="Return tensors in tuples, lists, dicts or dataclasses.",
            )


def _side_effect(change: Change) -> CaptureError:
    if change.after is MISSING:
        what = f"removes {change.name}"
    elif isinstance(change.after, Tensor):
        what = f"stores a tensor in {change.name}"
    else:
        what = f"changes {change.name}"
    return CaptureError(f"The step {what}, which a graph would not do again.", remedy=SIDE_EFFECT_REMEDY)
