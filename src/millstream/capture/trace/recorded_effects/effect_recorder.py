"""Makes the list of effects while a step is traced: what is called is noted, not called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from millstream._torch.tensors import storage_id
from millstream.capture.effects.expressions import Apply, Expression, text_of
from millstream.capture.effects.host_effects import Effect, EffectCall, Effects, Output, all_needs
from millstream.capture.effects.late_values import (
    LateItem,
    Later,
    Leaf,
    Reading,
    Returned,
    TextChanged,
    Whole,
    holds_token,
)
from millstream.capture.lines import here
from millstream.capture.trace.numbers.host_scalars import HostScalar
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import CLOCK, as_scalar, is_known_later, is_scalar
from millstream.capture.trace.numbers.whole_numbers import INT64, USUAL, Bounds, fits_int64
from millstream.capture.trace.recorded_effects.checks import find_check
from millstream.errors import CaptureError
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import Leaf as TreeLeaf
from millstream.tree.spec import PlainValue, Reference, Structure, walk

TEXT_REMEDY = (
    "Format the value itself, as in f'{value:>10.3f}', and put the text together with f-strings; decide by the number."
)

_active = threading.local()


def recorder_of_thread() -> EffectRecorder | None:
    """Return what records the step that this thread is tracing, if it is."""
    return getattr(_active, "recorder", None)


@dataclass
class EffectRecorder:
    """Effects of one trace."""

    questions: Questions  # receives what is asked of values
    # whether a container is the user's: it is passed on as it is, not as a copy
    own: Callable[[Any], bool] = lambda _: False
    # adds the changes of Python objects so far, that a call may look at
    before_call: Callable[[], object] = lambda: None
    program: list[Effect] = field(default_factory=list)  # the effects so far, in order
    conditions: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)  # see ``Effects``
    # what effects may read of the graph: leaves and tensors that have the value at that point
    kept: dict[Leaf, Tensor] = field(default_factory=dict)
    lines: dict[Leaf, str] = field(default_factory=dict)  # the user's lines of those
    outline: list[Any] = field(default_factory=list)
    given: frozenset[int] = frozenset()  # by id, containers among the arguments, which are copies of the user's
    passed: set[int] = field(default_factory=set)  # memory of tensors that parts of the step after this one use, too
    is_part: bool = False  # whether there are such parts
    # the outcome of a branch with which the program goes on, where both ways are traced; ``None`` where there is none
    choose: Callable[[Tensor], bool | None] = lambda value: None
    readings: list[Reading] = field(default_factory=list)  # of clocks so far, in order

    @property
    def is_active(self) -> bool:
        """Whether it records what this thread does now."""
        return recorder_of_thread() is self

    @contextmanager
    def active(self, *, is_on: bool = True) -> Iterator[None]:
        """For the length of the context, be what records this thread's step, or let nothing record it."""
        before = recorder_of_thread()
        _active.recorder = self if is_on else None
        try:
            yield
        finally:
            _active.recorder = before

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        is_state: bool = False,
        is_wanted: Callable[[], bool] | None = None,
        **kwargs: Any,
    ) -> int:
        """Note a call, to be made after each replay; returns its number, see ``Returned``."""
        self.before_call()
        where = here()
        leaves: list[Any] = []
        structure = open_structure((args, kwargs), leaves, parameters=True, own=self.own)
        pairs = [self._expression(leaf) for leaf in leaves]
        number = len(self.program)
        plain = [part.value for _, part in walk(structure, "") if isinstance(part, PlainValue)]
        self.outline.append((plain, [self._outline(leaf) for leaf in leaves]))
        needs = frozenset[Leaf]().union(*(needs for _, needs in pairs))
        expressions = tuple(expression for expression, _ in pairs)
        self.program.append(EffectCall(function, structure, expressions, needs, where, is_state, is_wanted, number))
        return number

    def item(self, tensor: Tensor) -> HostScalar:
        """The number in a tensor, as it is at this point of the program."""
        with torch.no_grad():
            kept = tensor.detach().reshape(()).clone()
            leaf = LateItem()
            self.kept[leaf], self.lines[leaf] = kept, here()
            is_whole = not (kept.is_floating_point() or kept.is_complex())
            number = kept.to(torch.int64 if is_whole else torch.float64)
        return HostScalar(
            leaf,
            self.questions,
            kept.device,
            frozenset((leaf,)),
            is_whole=is_whole,
            origin="a tensor's value, read with .item()",
            build=lambda: number,
            bounds=_bounds_in(kept.dtype) if is_whole else (INT64, INT64),
        )

    def check(self, number: HostScalar) -> None:
        """Let the host compute a whole number after each replay, that the graph computes with, and look at it."""
        self.call(_check_whole, number)

    def branch(self, number: HostScalar) -> bool | None:
        """Note what a branch on a number leads to, to be done after each replay.

        Returns:
            The outcome with which the program goes on; ``None`` where what another one leads to can neither wait nor
            be traced, too.
        """
        check = find_check()
        if check is None:
            return self.choose(number.in_graph()) if number.is_readable else None
        self.call(check, number, *check.variables)
        return not check.runs_if

    def text(self, tensor: Tensor, make: Callable[[Tensor], str]) -> str:
        """Text made from a tensor, as it is at this point."""
        leaf = self._keep(tensor)
        return self.questions.text(Apply(make, (leaf,)), frozenset((leaf,)))

    def array(self, tensor: Tensor) -> Leaf:
        """What gives a tensor with the values that it has at the end of the step, as an array shares its memory."""
        leaf = Whole()
        self.kept[leaf], self.lines[leaf] = tensor.detach(), here()
        return leaf

    def returned(self, call: int, part: int, is_whole: bool, origin: str) -> HostScalar:
        """A number that a call noted here will return, in a list."""
        host = torch.device("cpu")
        return HostScalar(Returned(call, part), self.questions, host, frozenset(), is_whole=is_whole, origin=origin)

    def time(self, clock: Callable[[], Any], *, is_whole: bool) -> HostScalar:
        """Return what a clock gives, which is read once in each call."""
        reading = Reading(clock, len(self.readings))
        self.readings.append(reading)
        host = torch.device("cpu")
        return HostScalar(reading, self.questions, host, frozenset(), is_whole=is_whole, origin=CLOCK)

    def host_output(self, value: Any) -> Output:
        """Return how a scalar, or text with tokens, is had after a replay."""
        expression, needs = self._expression(value)
        self.outline.append(self._outline(value))
        return Output("host", value=expression, needs=needs)

    def finish(self, outputs: Sequence[Output], results: list[Tensor]) -> Effects:
        """Add what effects and ``outputs`` need to the results of the graph: numbers of one type as one tensor."""
        items: dict[tuple[torch.dtype, torch.device], list[LateItem]] = {}
        wanted = all_needs(self.program, outputs)
        needs = [leaf for leaf in self.kept if leaf in wanted]  # in the same order in each trace, and in each process
        for leaf in needs:
            tensor = self.kept[leaf]
            if isinstance(leaf, LateItem):
                items.setdefault((tensor.dtype, tensor.device), []).append(leaf)
            else:
                leaf.index = len(results)
                is_shared = any(storage_id(tensor) == storage_id(each) for each in results)
                results.append(tensor.clone() if is_shared else tensor)
        stacks: list[int] = []
        for number, item in enumerate(item for group in items.values() for item in group):
            item.index = number
        for group in items.values():
            stacks.append(len(results))
            results.append(torch.stack([self.kept[item] for item in group]))
        waits = sorted({self.lines[leaf] for leaf in needs})
        return Effects(self.program, stacks, self.conditions, self.readings, waits)

    def _expression(self, value: Any) -> tuple[Expression, frozenset[Leaf]]:
        if is_scalar(value) or issubclass(type(value), Later):
            return value.of, value.needs
        if isinstance(value, str):
            try:
                template = self.questions.texts.template(value)
            except TextChanged:
                raise text_changed(here()) from None
            return template, template.needs
        leaf = self._keep(value)
        return leaf, frozenset((leaf,))

    def _outline(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.questions.texts.outline(value)
        is_expression = is_scalar(value) or issubclass(type(value), Later)
        return (type(value), text_of(value.of, _Numbered())) if is_expression else type(value)

    def _keep(self, tensor: Tensor) -> Leaf:
        leaf = Whole()
        with torch.no_grad():
            self.kept[leaf], self.lines[leaf] = tensor.detach().clone(), here()
        return leaf


class _Numbered(Sequence[str]):
    """Names for any number of numbers."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        return f"n{index}"


FEWEST_LEFT = 2**48
"""So far from the ends of 64 bits is what tensors of that dtype are taken to hold: they count."""


def _bounds_in(dtype: torch.dtype) -> Bounds:
    """Between which numbers a whole one is in a tensor."""
    if dtype is torch.bool:
        return ((0, 1),) * 2
    info = torch.iinfo(dtype)
    if info.bits < 64:
        return ((info.min, info.max),) * 2
    return (INT64[0] + FEWEST_LEFT, INT64[1] - FEWEST_LEFT), USUAL


def _check_whole(number: Any) -> None:
    if not fits_int64(number):
        raise OverflowError(
            f"A captured step computed with {number}, which takes more than 64 bits: what it has written is wrong."
        )


def text_changed(where: str) -> CaptureError:
    """The refusal of text that depends on the characters of a value that is known later."""
    return CaptureError(
        "The step cuts, pads, compares or looks something up by text with a value in it that is known after the step.",
        where=where,
        remedy=TEXT_REMEDY,
    )


def open_structure(
    value: Any,
    leaves: list[Any],
    *,
    parameters: bool = False,
    own: Callable[[Any], bool] = lambda _: False,
    opened: Collection[type] = (),
) -> Structure:
    """Take a value apart; scalars and text with tokens, whose values are known later, are leaves like tensors.

    Args:
        value: Anything.
        leaves: Receives the tensors, the scalars and the text.
        parameters: Whether parameters shall be leaves, too.
        own: Whether a container is not taken apart.
        opened: Classes whose objects are taken apart, too.
    """

    def place_of(part: Any) -> Structure | None:
        if own(part):
            return Reference(part)
        is_leaf = isinstance(part, Tensor) and (parameters or not isinstance(part, nn.Parameter))
        if is_leaf or is_known_later(part):
            leaves.append(as_scalar(part))
            return TreeLeaf(len(leaves) - 1)
        if isinstance(part, bytes) and holds_token(part.decode(errors="ignore")):
            raise text_changed(here())
        if isinstance(part, dict) and any(map(is_known_later, part)):
            raise CaptureError(
                "The step makes a dict with a key that is another in each call.",
                where=here(),
                remedy="Use a list of pairs, or make the dict in ms.callback.",
            )
        return None

    return tree_flatten(value, place_of=place_of, opened=opened)[0]
