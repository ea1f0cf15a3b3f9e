"""Requests to the tracer, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from millstream._torch.modes.switches import SwitchSettings
from millstream.capture.effects.host_effects import Effects, Output
from millstream.capture.record.location import Location
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.discover import Found
from millstream.capture.state.lift import Lifted
from millstream.capture.trace.branches.flags import StateFlag
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.sizes import TracedSizes
from millstream.data_parallel.reducer import Reducer
from millstream.errors import CaptureError
from millstream.progress import Deferred
from millstream.tree.spec import Structure


@dataclass(frozen=True, slots=True, eq=False)
class NumberInput:
    """A number that the host reads in each call, and a graph what is computed from it."""

    location: Location  # where it is kept; of one among the arguments, where the traced call's is
    label: str  # how the graph's inputs call it, such as ``lr[0]``
    device: torch.device  # of the graph's inputs that are computed from it
    optimizer: Optimizer | None = None  # that keeps it, if one does
    is_argument: bool = False  # whether each call brings it

    @property
    def is_users(self) -> bool:
        """Whether it is none of an optimizer's."""
        return self.optimizer is None


def argument_input(name: str, device: torch.device, value: float) -> NumberInput:
    """A number among the arguments, in a place of its own, where a stand-in can be put while the step is traced."""
    return NumberInput(Location([value], 0, name), name, device, is_argument=True)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A tensor whose ``.grad`` the step may leave behind."""

    name: str  # of the tensor
    parameter: Tensor  # the user's tensor
    before: Tensor | None  # its gradient when the step starts, or ``None``


@dataclass
class Request:
    """A function to trace, and how."""

    function: Callable[..., Any]  # the user's function
    structure: Structure  # structure of ``(args, kwargs)``, with places for numbers that each call brings
    arguments: list[Tensor]  # the tensors among the arguments
    opened: Collection[type]  # classes of objects among the arguments that are taken apart
    roots: list[tuple[str, Any]]  # where the search for what the function reaches begins
    found: Found  # what it reaches
    state: list[Lifted]  # all tensors in ``found``
    gradients: list[Gradient]  # all tensors whose gradient may change
    numbers: list[NumberInput]  # numbers to be read at run time; those among the arguments come last
    changing: Container[Location]  # places whose tensors are to be read as arguments are
    # positions in ``state`` of numbers on the host, and the device on which the graph reads them
    host_scalars: dict[int, torch.device]
    settings: SwitchSettings  # the switches of the call
    settled: set[Any] = field(default_factory=set)  # changes of plain values that were seen before; see ``FirstChange``
    # places of numbers where an earlier trace of the same call has found plain ones in the end, see ``Disturbed``
    plain: set[Location] = field(default_factory=set)
    disturbed: set[Location] = field(default_factory=set)  # where other threads have written in earlier traces
    style: int = 0  # of text; see ``Texts``
    ways: tuple[bool, ...] = ()  # outcomes of the first branches on tensors' values; see ``Ways``
    replica: Reducer | None = None  # reduces all gradients between processes, if the step is to do that by itself
    # by position in ``arguments``, dimensions whose sizes are symbols
    dimensions: dict[int, frozenset[int]] = field(default_factory=dict)
    # whether ``float(number)`` and its like are numbers of the graph; ``None`` as long as nobody knows if it takes that
    converts: bool | None = None
    drawn: Sequence[Any] = ()  # random numbers that the step is to get, the first ones that it draws
    draws_by_generator: bool = False  # whether PyTorch's generators give all random numbers
    is_plain: bool = False  # whether the user's numbers stay what they are, and the graph is for those alone
    unsteady: set[int] = field(default_factory=set)  # memory of flags that the step writes; see ``StateFlags``
    waits_for_flags: bool = False  # whether the host may wait for a device to know one


@dataclass
class Traced:
    """The recorded step."""

    gm: fx.GraphModule  # the graph; its inputs are, in order, those in the four lists of positions that follow
    state: list[int]  # positions in ``Request.state`` of the inputs that are state
    gradients: list[int]  # positions in ``Request.gradients`` whose memory the graph reads or writes
    numbers: list[int]  # positions in ``Questions.inputs`` of the inputs that are numbers
    # positions in ``Request.arguments`` of the inputs that are arguments, and the device on which the graph wants them
    # if they are on another
    arguments: list[tuple[int, torch.device | None]]
    # of state that is read as arguments are, since other tensors take its place: position in ``Request.state``, and the
    # place that holds it. They are counted on after the arguments.
    replaced: list[tuple[int, Location]]
    written: list[bool]  # for each input, whether the graph writes it
    left: list[bool]  # for every gradient of the request, whether the step leaves one behind
    kept: list[bool]  # and whether that is the same tensor as before
    structure: Structure  # structure of the result
    outputs: list[Output]  # its tensors and numbers
    questions: Questions  # what the program asked about the numbers
    values: list[Any]  # the numbers of the request, as they are after the trace
    effects: Effects  # what to do on the host after every replay
    looked_at: set[int]  # by id, state of which the program read a shape or other metadata, or used the values
    asked: set[int]  # by id, tensors of which it read what arguments and inputs are not compared by otherwise
    optimizers: list[Optimizer]  # those that stepped
    writes_arguments: bool  # whether the graph writes to an argument
    record: Recorder  # of what was read and written
    wrapper_reads: dict[tuple[int, str], nn.Module]  # of DDP, what code of ours has read in its place
    sizes: TracedSizes | None = None  # those of arguments, if some were to be symbols
    num_converted: int = 0  # numbers of the graph that it has got by ``float(number)`` and its like
    flags: Sequence[StateFlag] = ()  # branches that hold for one outcome


# --- instead of that --------------------------------------------------------------------------------------------------


class NoGraph(Exception):  # noqa: N818 - to the step, which knows what to do: it is no error
    """No graph could be traced this time."""


@dataclass(eq=False)
class StateMissing(NoGraph):
    """State would be created now, of an optimizer or in a cache: only an eager call can give it values."""

    name: str
    where: str = ""  # of what a cache has no answer for: an eager call brings one, unless it goes another way


class EagerFirst(NoGraph):
    """An eager call must come first, to create what only an eager call can create."""


@dataclass(eq=False)
class NotNow(NoGraph):
    """The step cannot be captured while something goes on around the call, which may end."""

    error: CaptureError


@dataclass(eq=False)
class NotYet(NoGraph, Deferred):
    """The graph is lowered by another process; until it has ended, calls run as plain Python."""

    job: Any

    def __str__(self) -> str:
        return "compiled by another process; until it is done calls run as plain Python"


class OneShot(NoGraph):
    """The graph depends on the very value of a number that the step changes: it would not serve again."""


@dataclass(eq=False)
class FirstChange(NoGraph):
    """Something has another value after the step, maybe for the only time.

    That is a plain value in a place of the user's, or a switch of PyTorch's, which another thread may have set.
    """

    error: CaptureError  # for when it happens again and again


@dataclass(eq=False)
class OtherFlags(NoGraph):
    """The step writes flags for whose values it was traced, or needs some for which the host waits: traces again."""

    unsteady: frozenset[int] = frozenset()  # memory of those that it writes
    needs_waiting: bool = False


@dataclass(eq=False)
class FoundLate(NoGraph):
    """An object that discovery missed showed up while tracing: the step lifts it and traces again."""

    name: str
    value: Any
    where: str


@dataclass(eq=False)
class Disturbed(NoGraph):
    """Another thread has written to what the step uses while it was traced: the step traces again."""

    location: Location


@dataclass(eq=False)
class TypesCompared(NoGraph):
    """The step may ask of what type a number is in whose place there is another: it traces again with plain ones."""

    error: CaptureError  # for where that cannot be


class Converted(NoGraph):
    """The step makes plain numbers by ``float(number)`` or its like: it traces again so that they are of the graph."""


@dataclass(eq=False)
class NumbersChanged(NoGraph):
    """The step changes numbers that objects keep: it lifts them and traces again."""

    locations: list[Location]
