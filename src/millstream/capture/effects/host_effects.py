"""The host effects of a graph, in the order of the program: pure data, and how they run after a replay.

**Contract**
- After every replay each effect runs once, in order, on the caller's thread, before the call returns.
- After those that change state by what they have read of it the step's lock is released for each call.
- Where one raises, later calls of outputs are left out, as in eager Python; everything that belongs to the state is
  still done, because the tensors have moved on. Then the first error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler

from millstream.capture.effects.expressions import Expression
from millstream.capture.effects.late_values import Leaf, Reading, Values
from millstream.capture.record.location import Location
from millstream.locks import ForkSafeLock, released
from millstream.tree.spec import Structure, tree_unflatten


@dataclass(frozen=True, slots=True)
class Output:
    """The source of a part of the result: the graph, the host, or an argument or state itself."""

    kind: str  # ``"graph"``, ``"argument"``, ``"object"``, ``"gradient"`` or ``"host"``
    index: int = -1  # number of the graph's result or of the argument; ``-1`` otherwise
    value: Any = None  # the object, the tensor whose gradient it is, or an expression
    needs: frozenset[Leaf] = frozenset()  # what the expression reads of the graph's results


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a branch on a tensor's value."""

    index: int  # the graph's result that decides
    outcome: bool  # its value where this way is taken

    def is_taken(self, values: Values) -> bool:
        """Return whether it was; waits for the device."""
        return bool(values.tensors[self.index]) is self.outcome


@dataclass(frozen=True, slots=True)
class EffectWrite:
    """``location := expression``."""

    location: Location  # where to put it
    output: Output  # what to put there
    ways: tuple[Way, ...] = field(default=(), kw_only=True)  # that it belongs to

    def run(self, values: Values, value_of: Callable[[Output], Any]) -> None:  # noqa: ARG002  a count has use for them
        """Put it there."""
        self.location.set(value_of(self.output))


COUNTING = ForkSafeLock()
"""Held while any step reads a number again and writes it, or puts something in its place for a trace."""


@dataclass(frozen=True, slots=True)
class Count(EffectWrite):
    """``location := expression`` of the number there, on which other threads may have counted since the call began."""

    number: int  # its position among the numbers of the graph
    allow: Callable[[Sequence[Any]], bool]  # whether the graph holds for these numbers

    def run(self, values: Values, value_of: Callable[[Output], Any]) -> None:
        """Put it there, and let what follows read the number that this counts on."""
        value = value_of(self.output)  # without the lock: it may wait for the device
        with COUNTING.lock:
            while values.renew(self.number, self.location.get(), self.allow):
                value = value_of(self.output)
            self.location.set(value)


@dataclass(frozen=True, slots=True)
class EffectCall:
    """A call of something that is no tensor operation."""

    function: Callable[..., Any]  # what to call
    structure: Structure  # of its arguments, ``(args, kwargs)``
    expressions: tuple[Expression, ...]  # what stands in the places of leaves
    needs: frozenset[Leaf]  # what those read of the graph's results
    where: str  # the user's line
    is_state: bool = False  # whether it changes state that belongs to the step, as a scheduler's step does
    is_wanted: Callable[[], bool] | None = None  # asked first: whether to call at all
    number: int = -1  # by which ``Returned`` finds what it returns
    is_last: bool = False  # whether the state is done, so that meanwhile other threads may call the step
    ways: tuple[Way, ...] = ()  # that it belongs to

    def run(self, values: Values) -> None:
        """Call it."""
        if self.is_wanted is not None and not self.is_wanted():
            return
        args, kwargs = tree_unflatten(self.structure, [expression(values) for expression in self.expressions])
        with released() if self.is_last else nullcontext():
            values.returned[self.number] = self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Extend:
    """Appends to the list that is at some place then, which may be another in each call."""

    location: Location

    def __call__(self, values: Sequence[Any]) -> None:
        self.location.get().extend(values)


Effect: TypeAlias = EffectWrite | EffectCall


@dataclass
class Effects:
    """Everything that a graph's call does on the host."""

    program: list[Effect] = field(default_factory=list)  # in order
    stacks: list[int] = field(default_factory=list)  # which of the graph's results hold numbers for the host
    # questions that the program asked of the host, and their answers
    conditions: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # of clocks, in order
    waits: list[str] = field(default_factory=list)  # the user's lines whose values the host waits for
    branches: list[str] = field(default_factory=list)  # those of branches of which the graph computes both ways
    counts: list[Count] = field(default_factory=list)  # those writes of the program
    # the same for two traces that differ in the style of text alone; ``None`` where there is no text
    outline: Any = None

    @property
    def notes(self) -> list[str]:
        """What they cost, for people."""
        notes = [f"both ways of the branch at {line} are computed, and one is kept" for line in self.branches]
        if self.waits:
            notes.append(f"the host waits for the device once a call, for values at {', '.join(self.waits)}")
        return notes

    @property
    def targets(self) -> set[int]:
        """By id, objects whose methods are called: what they hold is none of the step's."""
        parts = [part for call in self.calls for part in (call.function, *getattr(call.function, "args", ()))]
        owners = {id(owner) for part in parts if (owner := getattr(part, "__self__", None)) is not None}
        owners |= {id(part.location.get()) for part in parts if isinstance(part, Extend)}
        return owners | {id(vars(part)) for part in parts if isinstance(part, LRScheduler)}

    @property
    def writes(self) -> list[EffectWrite]:
        """Those that put something into a Python object."""
        return [effect for effect in self.program if isinstance(effect, EffectWrite)]

    @property
    def grown(self) -> set[Location]:
        """Where lists are to which something is appended, whichever these are."""
        return {call.function.location for call in self.calls if isinstance(call.function, Extend)}

    @property
    def lists(self) -> list[list[Any]]:
        """Those to which something is appended."""
        functions = [call.function for call in self.calls if call.is_state]
        bound = [getattr(function, "__self__", None) for function in functions]
        bound += [function.location.get() for function in functions if isinstance(function, Extend)]
        return [*{id(each): each for each in bound if type(each) is list}.values()]

    @property
    def calls(self) -> list[EffectCall]:
        """The others."""
        return [effect for effect in self.program if isinstance(effect, EffectCall)]

    def find_last(self) -> None:
        """Note which calls come after all that changes state by what the call has read of it."""
        for position, effect in reversed([*enumerate(self.program)]):
            if effect.output.kind == "host" if isinstance(effect, EffectWrite) else effect.is_state:
                return
            if isinstance(effect, EffectCall):
                self.program[position] = replace(effect, is_last=True)

    def count(self, locations: Sequence[Location], allow: Callable[[Sequence[Any]], bool]) -> None:
        """Let the first write to each place of a number see what others have written there.

        Args:
            locations: Where the graph's numbers are.
            allow: Whether the graph holds for these numbers.
        """
        numbers = {location: number for number, location in enumerate(locations)}
        for position, effect in enumerate(self.program):
            if not isinstance(effect, EffectWrite):
                continue
            number = numbers.pop(effect.location, None)
            if number is not None and effect.output.kind == "host":
                count = self.program[position] = Count(effect.location, effect.output, number, allow, ways=effect.ways)
                self.counts.append(count)

    def run(self, values: Values, value_of: Callable[[Output], Any]) -> None:
        """Do everything; raises the first error, at the end."""
        failure: BaseException | None = None
        for effect in self.program:
            try:
                if effect.ways and not all(way.is_taken(values) for way in effect.ways):
                    continue
                if isinstance(effect, EffectWrite):
                    effect.run(values, value_of)
                elif failure is None or effect.is_state:
                    with self._own_writes_known(values) if effect.is_state else nullcontext():
                        effect.run(values)
            except BaseException as error:  # noqa: BLE001  also Ctrl-C: the state is made whole first
                if failure is None:
                    failure = error
                    if isinstance(effect, EffectCall):
                        error.add_note(f"Raised after a captured step, which is done, by its effect at {effect.where}.")
        if failure is not None:
            raise failure

    @contextmanager
    def _own_writes_known(self, values: Values) -> Iterator[None]:
        """What a scheduler writes within the context is no other thread's count.

        What follows reads it from the call's result. What reads the graph's number all the same has read it before.
        """
        before = [count.location.get() for count in self.counts]
        try:
            yield
        finally:
            for count, number in zip(self.counts, before, strict=True):
                if count.location.get() is not number:
                    values.keep(count.number)


def all_needs(effects: Iterable[Effect], outputs: Sequence[Output]) -> set[Leaf]:
    """Return what effects and results read of the graph's results."""
    needs = [effect.needs if isinstance(effect, EffectCall) else effect.output.needs for effect in effects]
    return set().union(*needs, *(output.needs for output in outputs))
