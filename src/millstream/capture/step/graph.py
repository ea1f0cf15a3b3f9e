"""Captured graphs of a step: whether one fits a call, how it runs, and which there are."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx

from millstream._torch.tensors import call_plainly, storage_id
from millstream.capture.effects.host_effects import Effects, Output
from millstream.capture.effects.late_values import Values, read_clocks
from millstream.capture.guards.guards import Guards
from millstream.capture.guards.recheck import OperatorLine
from millstream.capture.record.location import Location
from millstream.capture.state.signature import is_other, is_same
from millstream.capture.step.calls import CallForm
from millstream.capture.step.replay_errors import as_eager
from millstream.capture.step.symbolic_sizes import SizeGuard, form_without_sizes, numbers_of
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import is_number
from millstream.capture.trace.request import NotNow
from millstream.device.tensor_specs import TensorSpecs
from millstream.errors import CaptureError
from millstream.tree.spec import Leaf, Structure, tree_unflatten

STATE_NAMES = "state_names"
"""Where a traced graph's ``meta`` has the names of the inputs that come before the arguments."""


class Build(Protocol):
    """Turns a traced step into something that runs it.

    Args:
        gm: A flat graph of aten operators; it may write its inputs.
        inputs: The inputs of the first run.
        static: Positions of the inputs whose memory is the same in every call.
    """

    def __call__(
        self, gm: fx.GraphModule, inputs: list[Tensor], static: frozenset[int]
    ) -> Callable[[list[Tensor]], list[Tensor]]: ...


@dataclass(slots=True)
class Slot:
    """A number on the host, as a tensor without dimensions that a graph reads."""

    tensor: Tensor
    value: Any = None  # the number
    memory: Any = field(init=False)  # as NumPy sees it, on the host: writing to it takes a tenth of the time

    def __post_init__(self) -> None:
        self.memory = self.tensor.numpy() if self.tensor.is_cpu else None

    @staticmethod
    def like(fake: Tensor) -> Slot:
        """One for a tensor without values."""
        kind = ArraySlot if fake.dim() else Slot
        return kind(torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device))

    def set(self, value: Any) -> None:
        """Let the graph read ``value`` from now on."""
        if self.memory is not None:
            self.memory[()] = value
        else:
            self.tensor.fill_(value)
        self.value = value


class ArraySlot(Slot):
    """An array on the host, as a tensor that a graph reads. It has no ``value``: the array itself may change."""

    def set(self, value: Any) -> None:
        if self.memory is not None:
            self.memory[...] = value
        else:
            self.tensor.copy_(torch.from_numpy(np.ascontiguousarray(value)))


@dataclass(slots=True)
class DeviceScalar:
    """A number in a tensor on the host that a graph on a device reads."""

    read: Callable[[], Any]  # gives the number that is there now
    slot: Slot


@dataclass(slots=True, eq=False)
class StepGraph:
    """One captured graph of a step."""

    signature: dict[str, str]  # tensors of the arguments by name, with dtype and shape, for people
    state_names: list[str]  # names of the inputs that come before the arguments, in order
    gm: fx.GraphModule  # the traced graph
    trace_seconds: float  # tracing alone
    key: Any  # what calls that it may fit have in common
    form: CallForm  # of the call that it was captured in
    guards: Guards  # what it takes for granted
    static: list[Tensor]  # its inputs before the arguments
    # which arguments are inputs, and the device to which they must be brought, if any
    arguments: list[tuple[int, torch.device | None]]
    places: list[Location]  # where tensors are that it reads as if they were arguments, counted on after those
    # what it takes for granted of arguments besides that: position, form, what that gives
    expected: list[tuple[int, Callable[[Any], Any], Any]]
    changing: Container[Location]  # places whose tensors were to be read in that way, if the graph reads any
    unsteady: set[int]  # flags that the step was known to write, by memory; see ``StateFlags``
    waits_for_flags: bool  # whether the host was to wait for a device to know others
    listing: list[OperatorLine]  # what it does, to compare with, if it is checked
    sources: list[Location]  # where the numbers are that each call may change
    slots: list[Slot]  # what it reads of them; those that it has use for are among ``static``
    device_scalars: list[DeviceScalar]  # numbers in tensors on the host that it reads; among ``static``
    numbers: list[Any]  # those at ``sources`` when last found to be fine
    hyperparameters: list[tuple[int, str]]  # which of ``sources`` are of optimizers, by name
    questions: Questions  # what the program asked about them, and computes of them for the graph
    left: list[tuple[Tensor, Tensor | None]]  # tensors and the gradient each gets after a run, where that is another
    structure: Structure  # of the result
    outputs: list[Output]  # tensors of the result
    effects: Effects  # what to do on the host after a run
    stepped: list[dict[str, Any]]  # attributes of the optimizers that step
    containers: list[Any]  # that it reaches without its arguments
    written: list[Tensor]  # those of ``static`` that it writes
    parameters: list[Tensor]  # the user's parameters that it writes
    own_memory: AddressRanges  # of the user's state, in which no argument may lie
    writes_arguments: bool  # whether it writes to an argument
    sizes: SizeGuard | None = None  # for which sizes of arguments it holds, if those are not all part of ``key``
    capture_seconds: float = 0.0  # time to trace and build it and to run it once
    num_runs: int = 0  # how often it ran
    specs: TensorSpecs | None = None  # what tensors among its arguments look like, where compiled code may tell
    times: dict[int, Any] = field(default_factory=dict)  # what clocks gave before it ran, see ``Values``
    kinds: tuple[type, ...] = ()  # of its arguments, where some of them are numbers that each call brings
    executable: Callable[[list[Tensor]], list[Tensor]] = field(init=False)  # what ``build`` made of it
    # what that passes everything on to as it is, once it is known to
    direct: Callable[[list[Tensor]], list[Tensor]] | None = field(default=None, init=False)
    is_on_host: bool = field(init=False)  # whether kernels run one after another, within the call
    has_calls: bool = field(init=False)  # whether something of the user's may be called after it
    readers: list[Callable[[], Any]] = field(init=False)  # of ``sources``
    reads_arrays: bool = field(init=False)  # whether it reads arrays of NumPy's, which may have been filled anew

    def __post_init__(self) -> None:
        self.is_on_host = all(tensor.is_cpu for tensor in self.static)
        self.effects.find_last()
        self.has_calls = bool(self.effects.calls)
        self.effects.count(self.sources, self.questions.allow)
        self.readers = [location.reader() for location in self.sources]
        self.reads_arrays = any(isinstance(slot, ArraySlot) for slot in self.slots)

    def fits(self, arguments: list[Tensor], given: Sequence[float] = ()) -> bool:
        """Whether the graph may run now. If so, its numbers and gradients are brought into their places.

        Args:
            arguments: Tensors among the arguments.
            given: Numbers among them that each call brings.
        """
        if self.sizes is not None and not self.sizes.hold(arguments):
            return False
        misplaced = self.guards.hold()
        if misplaced is None or not self.own_memory.is_apart_from(
            self.complete(arguments), among_each_other=self.writes_arguments
        ):
            return False
        if self.expected and not all(form_of(arguments[index]) == form for index, form_of, form in self.expected):
            return False
        has_draws = bool(self.questions.drawn)
        if not has_draws and not self._take_numbers(given):
            return False
        conditions = self.effects.conditions
        if conditions and any(ask() != answer for ask, answer in conditions):
            return False
        if misplaced and not restore_gradients(misplaced):
            return False
        for scalar in self.device_scalars:
            number = scalar.read()
            if is_other(number, scalar.slot.value):
                scalar.slot.set(number)
        return not has_draws or self._take_numbers(given)  # at last, as the graph must run once it has drawn

    def _take_numbers(self, given: Sequence[float]) -> bool:
        """Bring what the graph reads of its numbers up to date, and draw; whether it holds for them."""
        try:
            numbers = self._numbers_now(given)
        except (KeyError, IndexError, ValueError):  # there is none any more
            return False
        questions = self.questions
        is_same_again = all(map(is_, numbers, self.numbers)) or all(map(is_same, numbers, self.numbers))
        if is_same_again and not questions.drawn and not self.reads_arrays:
            return True
        derive = questions.draw if questions.drawn else questions.derive
        derived = derive(numbers) if all(map(is_number, numbers)) else None
        if derived is None:
            return False
        before, self.numbers = self.numbers, numbers
        self._fill(derived)
        for index, _ in self.hyperparameters:
            if numbers[index] is not before[index]:
                self.tell_hyperparameters()
                break
        return True

    def _numbers_now(self, given: Sequence[float]) -> list[Any]:
        kept = self.readers[: len(self.readers) - len(given)] if given else self.readers
        return [*(read() for read in kept), *given]

    def changed_number(self, given: Sequence[float]) -> tuple[str, Any, Any] | None:
        """Which number keeps the graph from running, if one does: its name, what it was, and is."""
        numbers = [*(location.get() for location in self.sources[: len(self.sources) - len(given)]), *given]
        if all(map(is_number, numbers)) and self.questions.allow(numbers):
            return None
        changed = zip(self.sources, self.numbers, numbers, strict=True)
        found = ((str(location), before, now) for location, before, now in changed if now != before)
        return next(found, ("a hyperparameter", None, None))

    def tell_hyperparameters(self) -> None:
        """Let what runs the graph know numbers of optimizers, if it compares them with other processes."""
        tell = getattr(self.executable, "tell_hyperparameters", None)
        if tell is not None:
            tell([f"{name} = {self.numbers[index]!r}" for index, name in self.hyperparameters])

    def fill_slots(self) -> None:
        """Bring what the graph reads of its numbers up to date, for the first time.

        Raises:
            NotNow: Another thread has drawn random numbers meanwhile, and others decide now.
        """
        derived = self.questions.draw(self.numbers) if self.questions.drawn else self.questions.derive(self.numbers)
        if derived is None and self.questions.drawn:
            raise NotNow(
                CaptureError(
                    f"Another thread uses the generator of {self.questions.draws[0].name} while the step is captured.",
                    remedy="Give each thread a generator of its own.",
                )
            )
        assert derived is not None
        self._fill(derived)

    def _fill(self, derived: list[Any]) -> None:
        for slot, number in zip(self.slots, derived, strict=True):
            if number is not slot.value and (slot.value is None or is_other(number, slot.value)):
                slot.set(number)

    def complete(self, arguments: list[Tensor]) -> list[Tensor]:
        """``arguments`` and what is read as if it were among them."""
        return [*arguments, *(location.get() for location in self.places)] if self.places else arguments

    def inputs(self, arguments: list[Tensor]) -> list[Tensor]:
        """A new list of the executable's inputs, for complete ``arguments``."""
        given = [
            arguments[index] if device is None else arguments[index].to(device, non_blocking=True)
            for index, device in self.arguments
        ]
        return [*self.static, *given]

    def examples(self, arguments: list[Tensor]) -> list[Tensor]:
        """What the executable is built for: those inputs, or fake tensors where sizes are symbols."""
        if self.sizes is None:
            return self.inputs(arguments)
        return [node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder")]

    def run(self, arguments: list[Tensor]) -> Any:
        """Run the graph, do what else the step does, and return its result."""
        arguments = self.complete(arguments)
        return self.finish(arguments, self.replay(arguments))

    def replay(self, arguments: list[Tensor]) -> list[Tensor]:
        """Run the graph for complete ``arguments``; returns its results."""
        failed: IndexError | None = None
        if self.effects.readings:
            self.times = read_clocks(self.effects.readings, is_early=True)
        try:
            results = call_plainly(self.direct or self.executable, self.inputs(arguments))
        except IndexError as error:
            failed, results = error, []
        if failed is not None:  # a kernel knows neither the operator nor what that says
            raise as_eager(failed, self.gm, self.inputs(arguments))
        # Kernels write behind autograd's back; an older graph that still needs a parameter must notice.
        if self.guards.quick is None:
            torch.autograd.graph.increment_version(self.parameters)
        else:
            self.guards.quick.bump_versions()
        self.num_runs += 1
        if self.direct is None:
            self.direct = getattr(self.executable, "direct", None)
        for tensor, gradient in self.left:
            tensor.grad = gradient
        return results

    def finish(self, arguments: list[Tensor], results: list[Tensor]) -> Any:
        """Do what the step does on the host, and return its result."""
        for attributes in self.stepped:
            if "step" in attributes:  # the wrapper of a scheduler, which would note that the optimizer has stepped
                attributes["_opt_called"] = True
        if isinstance(self.structure, Leaf) and self.outputs[0].kind == "graph" and not self.effects.program:
            return results[0]
        numbers = self.numbers if self.sizes is None else [*self.numbers, *numbers_of(arguments)]
        if self.questions.drawn:
            numbers = [*numbers[: self.questions.num_before], *self.questions.drawn]
        values = Values(numbers, results, self.effects.stacks, self.effects.readings, self.times)

        def value_of(output: Output) -> Any:
            if output.kind == "graph":
                return results[output.index]
            if output.kind == "host":
                return output.value(values)
            if output.kind == "gradient":
                return output.value.grad
            return arguments[output.index] if output.kind == "argument" else output.value

        self.effects.run(values, value_of)
        return tree_unflatten(self.structure, [*map(value_of, self.outputs)])

    def release(self) -> None:
        """Let the executable give back its memory, if it knows how to."""
        release = getattr(getattr(self, "executable", None), "release", None)
        if release is not None:
            release()


class GraphCache:
    """Graphs by the key of their calls, in the order in which they were used.

    Attributes:
        usual: The graph that ran last, if it is still there; its arguments are looked at before a key is made.
    """

    def __init__(self) -> None:
        self.usual: StepGraph | None = None
        self._graphs: OrderedDict[int, StepGraph] = OrderedDict()
        self._by_key: dict[Any, list[StepGraph]] = {}
        self._last: tuple[Any, list[StepGraph]] = (None, [])  # saves hashing the key of the usual call
        self._has_symbols = False  # in any graph

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[StepGraph]:
        """The graphs there are, the one unused for longest first."""
        return iter(list(self._graphs.values()))

    @property
    def last_used(self) -> StepGraph | None:
        """The graph that was used or kept last."""
        return next(reversed(self._graphs.values()), None)

    def candidates(self, key: Any) -> list[StepGraph]:
        """All that may serve calls with this key, of this size or of several."""
        return [*self._by_key.get(key, ()), *self._by_key.get(form_without_sizes(key), ())]

    def find(self, key: Any, arguments: list[Tensor], given: Sequence[float]) -> StepGraph | None:
        """The graph that fits, ready to run."""
        last_key, graphs = self._last
        if key != last_key:
            graphs = self._by_key.get(key, [])
            self._last = (key, graphs)
        if self._has_symbols:
            graphs = [*graphs, *self._by_key.get(form_without_sizes(key), ())]
        for graph in graphs:
            if graph.fits(arguments, given):
                self._graphs.move_to_end(id(graph))
                self.usual = graph
                return graph
        return None

    def keep(self, graph: StepGraph) -> None:
        """Add a graph, which is tried before others with its key."""
        self.usual = None
        if graph.sizes is not None:
            self._has_symbols = True
            graph.key = form_without_sizes(graph.key)
        self._graphs[id(graph)] = graph
        self._by_key.setdefault(graph.key, []).insert(0, graph)
        self._last = (None, [])

    def drop(self, graph: StepGraph) -> None:
        """Remove a graph, if it is still there; it is not released."""
        self.usual = None
        if self._graphs.pop(id(graph), None) is None:
            return
        graphs = self._by_key[graph.key]
        graphs.remove(graph)
        if not graphs:
            del self._by_key[graph.key]
        self._last = (None, [])


def restore_gradients(misplaced: Iterable[tuple[Tensor, Tensor | None]]) -> bool:
    """Move gradients, left by eager code, to where graphs expect them; ``False``, and none moved, if one cannot be."""
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    for tensor, buffer in misplaced:
        gradient = tensor.grad
        if gradient is None or buffer is None or not is_alike(gradient, buffer):
            return False
        moves.append((tensor, gradient.detach(), buffer))
    # One may lie in the buffer of another, which would be overwritten first.
    buffers = {storage_id(buffer) for _, _, buffer in moves}
    values = [value.clone() if storage_id(value) in buffers else value for _, value, _ in moves]
    for (tensor, _, buffer), value in zip(moves, values, strict=True):
        buffer.copy_(value)
        tensor.grad = buffer
    return True


def is_alike(left: Tensor, right: Tensor) -> bool:
    """Whether two gradients differ in their values alone."""
    return (left.shape, left.dtype, left.device, left.layout) == (right.shape, right.dtype, right.device, right.layout)


class AddressRanges:
    """Ranges of addresses.

    Args:
        tensors: Their storages are the ranges.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        ranges = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def is_apart_from(self, tensors: Sequence[Tensor], *, among_each_other: bool = False) -> bool:
        """Whether none of ``tensors`` lies within, nor, if so asked, shares memory with another of them."""
        for tensor in tensors:
            address = tensor.data_ptr()
            at = bisect_right(self._starts, address)
            if at and address < self._ends[at - 1]:
                return False
        if not among_each_other:
            return True
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        return len({*storages} - {0}) == len(storages) - storages.count(0)
