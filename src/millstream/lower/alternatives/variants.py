"""A program lowered again with other alternatives, in a later call, and which of them are to be had from the start."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing

from millstream.lower import workarounds
from millstream.lower.alternatives import table
from millstream.lower.kept import ProgramFile
from millstream.schedule.improve import NOTHING, Choice, Offer, Tried, from_json, to_json

Result = TypeVar("Result")


@dataclass(frozen=True)
class Variants(Generic[Result]):
    """The ways in which a program can be lowered otherwise.

    Attributes:
        find: Where there are alternatives: all, or those that are usually tried.
        lower: Lowers it again with some of them.
        keep: Called once with what was chosen: the choice, what came of each, and the program.
    """

    find: Callable[[bool], tuple[Offer, ...]]
    lower: Callable[[Choice], Result]
    keep: Callable[[Choice, Sequence[Tried], Result], None]


def take_options(options: dict[str, Any]) -> tuple[list[str], bool]:
    """Take ours from Inductor's options: names of what is left out, and whether no clock may decide what rounds."""
    off = [] if options.pop("alternatives", True) else [table.SWITCH]
    return off, bool(options.pop("reproducible", False))


def find_choice(record: ProgramFile | None, *, is_fixed: bool) -> tuple[Choice, tuple[Tried, ...]]:
    """The alternatives that a program has from the start: those found faster before, in this process or another."""
    if is_fixed or torch.are_deterministic_algorithms_enabled():
        return table.FIXED, ()
    noted = record.noted_choice() if record is not None and table.alternatives() else None
    try:
        return from_json(noted) if isinstance(noted, Mapping) else (NOTHING, ())
    except (KeyError, TypeError, ValueError):  # spoiled
        return NOTHING, ()


def may_try(*, is_fixed: bool) -> bool:
    """Return whether a clock may decide which alternatives a program has."""
    return not is_fixed and not torch.are_deterministic_algorithms_enabled() and bool(table.alternatives())


class Choosing(NamedTuple):
    """The alternatives that a graph is lowered with.

    Attributes:
        is_fixed: Whether a table says so, and no clock.
        choice: Those that are tried now; ``None`` for what is known to be faster.
        usual: The record of the usual program, where something is tried now.
    """

    is_fixed: bool = True
    choice: Choice | None = None
    usual: ProgramFile | None = None

    def decide(
        self, open_record: Callable[[], ProgramFile | None]
    ) -> tuple[Choice, tuple[Tried, ...], ProgramFile | None]:
        """Return them, what came of others, and the record of the program."""
        record = open_record() if self.choice is None else self.usual
        choice, tried = (self.choice, ()) if self.choice else find_choice(record, is_fixed=self.is_fixed)
        return choice, tried, record.variant(sorted(choice)) if record is not None and choice else record


class Pointer:
    """The program on disk that a step's own graph stands for.

    Args:
        step: The record of that graph.
        first: Of the program that it has been made.
    """

    def __init__(self, step: ProgramFile, first: ProgramFile) -> None:
        self._step, self._first = step, first
        self._added: list[Any] | None = None

    def keep_step(self, added: list[Any]) -> None:
        """Let it stand for the first program, which is passed these tensors before the step's own inputs."""
        self._added = added
        self._step.point_to(self._first, added)

    def point_to(self, other: ProgramFile, noted: Mapping[str, Any]) -> None:
        """Let it stand for another one, which takes the same inputs, and note why."""
        if self._added is not None:
            self._step.point_to(other, self._added)
            self._step.note_choice(noted)


def vary(
    graph: torch.fx.GraphModule,
    usual: ProgramFile | None,
    lower: Callable[..., Any],
    lowering: Callable[[], AbstractContextManager[None]],
    pointer: Pointer | None,
    *,
    is_step: bool,
) -> Variants[Any]:
    """Say how a program can be lowered otherwise, in later calls.

    Args:
        graph: That it is made of, which stays as it is.
        usual: Its record.
        lower: Lowers a graph with example inputs.
        lowering: What that is done in.
        pointer: Which program on disk the step stands for, if it is one.
        is_step: Whether it is one.
    """

    def find(is_all: bool) -> tuple[Offer, ...]:
        with lowering():
            return table.find_offers(graph.graph, is_step=is_step, is_all=is_all)

    def lower_again(choice: Choice) -> Any:
        # Rewrites and Inductor's passes change the graph they are given.
        fresh = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        inputs = [node.meta["val"] for node in fresh.graph.find_nodes(op="placeholder")]
        with lowering(), workarounds.lowering(), tracing(TracingContext(detect_fake_mode(inputs))):
            return lower(fresh, inputs, choosing=Choosing(choice=choice, usual=usual))

    def keep(choice: Choice, tried: Sequence[Tried], chosen: Any) -> None:
        if usual is None:
            return
        usual.note_choice(noted := to_json(choice, tried))
        if pointer is not None and chosen.record is not None:
            pointer.point_to(chosen.record, noted)

    return Variants(find, lower_again, keep)
