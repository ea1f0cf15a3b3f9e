"""What is asked of the tracer, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from millstream.capture.effects.places import NumberInput
from millstream.capture.effects.program import Effects, Output
from millstream.capture.state.discover import Found
from millstream.capture.state.lift import Lifted
from millstream.capture.state.location import Entry, Location
from millstream.capture.state.signature import Structure
from millstream.capture.trace.scalars import Questions
from millstream.capture.trace.sizes import TracedSizes
from millstream.data_parallel.reducer import Reducer


@dataclass(frozen=True, slots=True)
class Gradient:
    """A tensor whose ``.grad`` the step may leave behind.

    Attributes:
        name: Of the tensor.
        parameter: The user's tensor.
        before: Its gradient when the step starts, or ``None``.
    """

    name: str
    parameter: Tensor
    before: Tensor | None


@dataclass
class Request:
    """What to trace.

    Attributes:
        function: The user's function.
        structure: Structure of ``(args, kwargs)``, with places for numbers that each call brings.
        arguments: The tensors among the arguments.
        roots: Where the search for what the function reaches begins.
        found: What it reaches.
        state: All tensors in ``found``.
        gradients: All tensors whose gradient may change.
        numbers: Numbers to be read at run time; those among the arguments come last.
        changing: Places whose tensors are to be read as arguments are.
        mirrored: Positions in ``state`` of numbers on the host, and the device on which the graph reads them.
        settled: Changes of plain values that were seen before; see ``FirstChange``.
        style: Of text; see ``STYLES``.
        replica: Reduces all gradients between processes, if the step is to do that by itself.
        dimensions: By position in ``arguments``, dimensions whose sizes are symbols.
    """

    function: Callable[..., Any]
    structure: Structure
    arguments: list[Tensor]
    roots: list[tuple[str, Any]]
    found: Found
    state: list[Lifted]
    gradients: list[Gradient]
    numbers: list[NumberInput]
    changing: Container[Location]
    mirrored: dict[int, torch.device]
    settled: set[Any] = field(default_factory=set)
    style: int = 0
    replica: Reducer | None = None
    dimensions: dict[int, frozenset[int]] = field(default_factory=dict)


@dataclass
class Traced:
    """The recorded step.

    Attributes:
        gm: The graph; its inputs are, in order, those in the four lists of positions that follow.
        state: Positions in ``Request.state`` of the inputs that are state.
        gradients: Positions in ``Request.gradients`` whose memory the graph reads or writes.
        numbers: Positions in ``Request.numbers`` of the inputs that are numbers.
        arguments: Positions in ``Request.arguments`` of the inputs that are arguments, and the device on which the
            graph wants them if they are on another.
        replaced: Of state that is read as arguments are, since other tensors take its place: position in
            ``Request.state``, and the place that holds it. They are counted on after the arguments.
        written: For each input, whether the graph writes it.
        left: For every gradient of the request, whether the step leaves one behind.
        structure: Structure of the result.
        outputs: Its tensors and numbers.
        questions: What the program asked about the numbers.
        used: What the code reaches that ran.
        reads: Module attributes that the program read.
        effects: What to do on the host after every replay.
        looked_at: By id, state of which the program read a shape or other metadata, or used the values.
        asked: By id, tensors of which it read what arguments and inputs are not compared by otherwise.
        registered: By id of the dict and key, parameters and buffers that the program read as attributes of modules.
        variables: Names of environment variables that it read.
        optimizers: Those that stepped.
        writes_arguments: Whether the graph writes to an argument.
        sizes: Those of arguments, if some were to be symbols.
    """

    gm: fx.GraphModule
    state: list[int]
    gradients: list[int]
    numbers: list[int]
    arguments: list[tuple[int, torch.device | None]]
    replaced: list[tuple[int, Location]]
    written: list[bool]
    left: list[bool]
    structure: Structure
    outputs: list[Output]
    questions: Questions
    used: Found
    reads: list[Entry]
    effects: Effects
    looked_at: set[int]
    asked: set[int]
    registered: set[tuple[int, str]]
    variables: set[str]
    optimizers: list[Optimizer]
    writes_arguments: bool
    sizes: TracedSizes | None = None


# --- instead of that --------------------------------------------------------------------------------------------------


class StateMissing(Exception):  # noqa: N818 - a message to the step, which runs eagerly this time
    """State would be created now, of an optimizer or in a cache: only an eager call can give it values."""


class EagerFirst(Exception):  # noqa: N818
    """An eager call must come first, to create what only an eager call can create."""


class FoundLate(Exception):  # noqa: N818 - a message to the step, which lifts the objects and traces again
    """Objects that discovery missed showed up while tracing."""

    def __init__(self, name: str, value: Any, where: str) -> None:
        super().__init__(name)
        self.name, self.value, self.where = name, value, where


class ServesOnce(Exception):  # noqa: N818 - a message to the step, which runs eagerly this time
    """The graph depends on the very value of a number that the step changes: it would not serve again."""


class FirstChange(Exception):  # noqa: N818 - a message to the step, which runs eagerly this time
    """The step puts a plain value in the place of another for the first time: it may be the only time."""


class NumbersChanged(Exception):  # noqa: N818 - a message to the step, which lifts them and traces again
    """The step changes numbers that objects keep."""

    def __init__(self, locations: list[Location]) -> None:
        super().__init__()
        self.locations = locations
