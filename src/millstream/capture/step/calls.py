"""Calls of a step: their arguments, taken apart, and what they have in common with others."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from millstream._torch.modes.switches import SwitchSettings
from millstream._torch.tensors import place_of_implementation
from millstream.capture.state.discover import Found, discover
from millstream.capture.state.objects import is_written_in_python, objects_of_batch
from millstream.capture.state.signature import (
    TensorSpec,
    is_other,
    key_of,
    key_of_tensors,
    settings_of,
)
from millstream.capture.trace.request import NumberInput, argument_input
from millstream.device.tensor_specs import TensorSpecs
from millstream.tree.batches import is_registered
from millstream.tree.containers import containers_in
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import (
    Leaf,
    Number,
    PlainValue,
    Reference,
    Structure,
    kinds_of,
    replace_numbers,
    walk_arguments,
)

MOST_KEPT = 4
"""Objects of a class that a step may change, each with a graph of its own, before it is a new one in each call."""

MOST_FORMS = 100
"""Kinds of arguments whose numbers are remembered, to see which of them change."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """What is known of a call without its tensors."""

    key: Any  # what it has in common with the calls that the same graph may serve
    structure: Structure  # of ``(args, kwargs)``, with places for the numbers in ``given``
    given: Sequence[float]  # its numbers that were seen to change
    parameters: Sequence[str]  # names of the function's parameters

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Those of its tensors."""
        return self.key[2:]  # type: ignore[no-any-return]

    @property
    def settings(self) -> SwitchSettings:
        """PyTorch's switches."""
        return settings_of(self.key)

    @property
    def modes(self) -> tuple[Any, ...]:
        """What else of the thread it runs under."""
        _, (_, *modes), *_ = self.key
        return tuple(modes)

    def parts(self) -> Iterator[tuple[str, Structure, Any]]:
        """Names of all that is no container, what stands for it, and its value; a tensor's spec."""
        specs, given = self.specs, iter(self.given)
        for name, part in walk_arguments(self.structure, self.parameters):
            if isinstance(part, Leaf):
                yield name, part, specs[part.index]
            elif isinstance(part, Number):
                yield name, part, next(given)
            else:
                yield name, part, part.value if isinstance(part, PlainValue) else None


def text_of_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A tensor for people: ``float32[16, 8]``."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


@dataclass
class StepCall:
    """One call of a step."""

    key: Any  # what it has in common with the calls that the same graph may serve
    structure: Structure  # structure of ``(args, kwargs)``, with places for the numbers in ``given``
    arguments: list[Tensor]  # its tensors
    given: Sequence[float]  # its numbers that were seen to change
    args: tuple[Any, ...]  # positional arguments as given
    kwargs: dict[str, Any]  # keyword arguments as given
    name: str  # of the step
    function: Callable[..., Any]  # the user's
    parameters: Sequence[str]  # names of the function's parameters
    opened: frozenset[type] = frozenset()  # classes of objects that are taken apart
    held: Container[int] = ()  # by id, containers that are not taken apart
    cause: Any = None  # why no graph serves it, once that is known

    @property
    def form(self) -> CallForm:
        """What is known of it without its tensors."""
        return CallForm(self.key, self.structure, self.given, self.parameters)

    @property
    def signature(self) -> dict[str, str]:
        """The tensors by name, for people."""
        parts = walk_arguments(self.structure, self.parameters)
        names = {part.index: name for name, part in reversed([*parts]) if isinstance(part, Leaf)}
        return {names[index]: text_of_tensor(tensor.shape, tensor.dtype) for index, tensor in enumerate(self.arguments)}

    def numbers(self, device: torch.device) -> Iterator[NumberInput]:
        """The numbers that were seen to change, for graphs on ``device``."""
        parts = walk_arguments(self.structure, self.parameters)
        names = [name for name, part in parts if isinstance(part, Number)]
        for name, value in zip(names, self.given, strict=True):
            yield argument_input(name, device, value)

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Names and objects among the arguments that are neither tensors nor plain values, and containers' classes."""
        for name, part in walk_arguments(self.structure, self.parameters):
            if isinstance(part, Reference):
                yield name, part.target
        yield from ((kind.__qualname__, kind) for kind in kinds_of(self.structure))

    def roots(self) -> Iterator[tuple[str, Any]]:
        """Where the search for what the step reaches begins: its function, and those objects."""
        yield self.name, self.function
        yield from self.objects()

    def search(self) -> Found:
        """What the step reaches."""
        return discover(self.roots())

    def optimizers(self) -> list[Optimizer]:
        """Those that it reaches."""
        return [optimizer for _, optimizer in self.search().optimizers]


class Calls:
    """Makes calls of their arguments, and learns which numbers among these change, and which objects are batches.

    Args:
        name: Of the step.
        function: The user's.

    Attributes:
        opened: Classes of objects among the arguments that are taken apart, as others of them come in each call.
        held: By id, containers that the step reaches without its arguments, too: among these they are what they are.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self._parameters = _parameters_of(function)
        self._varying: dict[Structure, frozenset[int]] = {}  # which numbers among the arguments change
        self._before: dict[Structure, list[float]] = {}  # that came first
        self.opened: frozenset[type] = frozenset()
        self.held: dict[int, Reference] = {}
        self._met: dict[str, Callable[[], Any]] = {}  # by the argument's name, the object that came last
        self._kept: Counter[type] = Counter()  # objects of classes that are not opened, since that cannot be captured

    def split_numbers(self, form: Any, numbers: Sequence[float]) -> tuple[Any, list[float]]:
        """Tell numbers among the arguments that are part of the form from those that each call brings."""
        varying = self._varying.get(form, frozenset())
        # Zeros with their signs, and a NaN as text, which is equal to itself.
        fixed = tuple(n if n and n == n else f"{n}" for i, n in enumerate(numbers) if i not in varying)
        return (form, fixed), [number for index, number in enumerate(numbers) if index in varying]

    def flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[float]
    ) -> tuple[Structure, list[Tensor]]:
        """Tell tensors and numbers from what remains."""
        return tree_flatten((args, kwargs), numbers, opened=self.opened, held=self.held)

    def hold(self, containers: Iterable[Any]) -> None:
        """Keep these, which graphs read by another way, apart from arguments that look alike."""
        self.held = {id(each): Reference(each) for each in containers}

    def hold_among(self, call: StepCall, containers: Iterable[Any]) -> bool:
        """Take the arguments of a call apart once more if some of these are among them, and none was known for that."""
        given = containers_in([call.args, call.kwargs], call.opened)
        found = {id(each): Reference(each) for each in containers if id(each) in given}
        if found.keys() <= self.held.keys():
            return False
        self.held |= found
        vars(call).update(vars(self.make(call.args, call.kwargs)) | {"cause": call.cause})
        return True

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
        """Look at the arguments; numbers that are others than they were before are brought by each call from now on."""
        numbers: list[float] = []
        structure, arguments = self.flatten(args, kwargs, numbers)
        if self._learn(structure):
            numbers = []
            structure, arguments = self.flatten(args, kwargs, numbers)
        form: Any = structure
        varying: Set[int] = frozenset()
        given: Sequence[float] = ()
        if numbers:
            if len(self._before) > MOST_FORMS:
                self._before.clear()
            before = self._before.setdefault(structure, numbers)
            changed = (index for index, number in enumerate(numbers) if is_other(number, before[index]))
            varying = self._varying[structure] = self._varying.get(structure, frozenset()).union(changed)
            form, given = self.split_numbers(structure, numbers)
        parts = (Number(type(n)) if i in varying else PlainValue(type(n), n) for i, n in enumerate(numbers))
        key = (None if kwargs else key_of_tensors(args)) or key_of(form, arguments)
        taken = self.opened.intersection(kinds_of(structure)) if self.opened else self.opened
        return StepCall(
            key=key,
            structure=replace_numbers(structure, parts),
            arguments=arguments,
            given=given,
            args=args,
            kwargs=kwargs,
            name=self.name,
            function=self.function,
            parameters=self._parameters,
            opened=taken,
            held=self.held,
        )

    def _learn(self, structure: Structure) -> bool:
        """Open the classes of batches: of registered ones, and where another object comes in the place of one."""
        opened = self.opened
        for name, part in walk_arguments(structure, self._parameters):
            if isinstance(part, Reference) and is_written_in_python(kind := type(part.target)):
                is_another = (met := self._met.get(name)) is not None and met() is not part.target
                if is_another or met is None:
                    self._met[name] = _reference_to(part.target)
                if is_another or is_registered(kind):
                    found = {type(each) for each in objects_of_batch(part.target)}
                    self._kept.update(found.intersection(self._kept))
                    self.opened |= {each for each in found if not 0 < self._kept[each] <= MOST_KEPT}
                    if kind in self.opened:
                        del self._met[name]
        return self.opened != opened

    def keep_whole(self, call: StepCall) -> StepCall | None:
        """The same call with objects as they are: for the few that a step may change, each with a graph of its own.

        Returns:
            The call; ``None`` where there are none that would be others, or where ever new ones have come.
        """
        kinds = {kind for kind in call.opened if not self._kept[kind]}
        if not kinds:
            return None
        self._kept.update(kinds)
        self.opened -= kinds
        return self.make(call.args, call.kwargs)

    def open_again(self, kinds: Iterable[type]) -> None:
        """Objects of these are taken apart for good."""
        for kind in kinds:
            self._kept[kind] = MOST_KEPT + 1
        self.opened |= {*kinds}


def _reference_to(value: Any) -> Callable[[], Any]:
    """What gives an object, as long as there is one; slots may have no place for weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def split_leaves(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Tensors among arguments, and numbers, where there is nothing else."""
    return [each for each in args if type(each) is Tensor], [each for each in args if type(each) is not Tensor]


def specs_of(call: StepCall) -> TensorSpecs | None:
    """What tensors in calls like this look like; ``None`` where, with numbers that calls bring, others things count."""
    tensors = [arg for arg in call.args if type(arg) is Tensor and not arg.requires_grad]
    numbers = [arg for arg in call.args if type(arg) in (float, int)]
    if (
        call.kwargs
        or len(tensors) != len(call.arguments)
        or len(numbers) != len(call.given)
        or len(tensors) + len(numbers) != len(call.args)
    ):
        return None
    with contextlib.suppress(ValueError):
        return TensorSpecs(tensors, place_of_implementation())
    return None


def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        return ()


def code_of(function: Callable[..., Any]) -> Any:
    """The code of a function or method; ``None`` of what has none."""
    return getattr(getattr(function, "__func__", function), "__code__", None)
