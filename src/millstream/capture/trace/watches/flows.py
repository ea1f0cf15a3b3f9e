"""Operators of control flow in a step: what their functions use beside their arguments is handed in, too.

Outside of a trace Dynamo does that: ``torch.cond(p, lambda a: a @ weight, ...)`` gets ``weight`` as one more operand,
for autograd and compilers see operands alone. Here each function is run once to see what it uses; afterwards another
tensor takes the place of each of these while it runs. What draws random numbers is handed a seed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunction
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from millstream._torch.seeded_randoms import DrawnFrom, new_seed
from millstream._torch.tensors import FakeTensor, storage_id
from millstream._torch.tracing import is_recorded, known_shapes, run_apart
from millstream.capture.trace.twins import Twins

FLOWS = frozenset({"cond", "while_loop", "scan", "map_impl"})
"""Names of the operators."""


class Flows:
    """The functions that run as parts of operators of control flow.

    Args:
        twins: Of the user's tensors.
        on: What such a function runs in.
        fail: Refuses the step, with a reason and a remedy.

    Attributes:
        draws_by_generator: Whether PyTorch's generators give the random numbers within functions.
    """

    draws_by_generator = False

    def __init__(
        self, twins: Twins, on: Callable[[], AbstractContextManager[Any]], fail: Callable[[str, str], object]
    ) -> None:
        self._twins, self._on, self._fail = twins, on, fail
        self._replaced: list[dict[int, Tensor] | _Used] = []  # outermost first

    @property
    def is_inside(self) -> bool:
        """Whether such a function runs now."""
        return bool(self._replaced)

    def replaced(self, value: Any) -> Any:
        """Return what stands, in the functions that run now, for a value, or for those in lists and tuples."""
        if isinstance(value, Tensor):
            for each in self._replaced:
                value = each.of(value) if isinstance(each, _Used) else each.get(id(value), value)
        elif type(value) in (list, tuple):
            return type(value)(map(self.replaced, value))
        elif type(value) is dict:
            return {key: self.replaced(each) for key, each in value.items()}
        return value

    def call(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call an operator.

        Args:
            name: Its own.
            run: It.
            args: What it is called with.
        """
        if not any(callable(each) and not isinstance(each, fx.GraphModule) for each in args):
            return run(*args)  # PyTorch's own functions of a backward pass
        pred, functions, first, sliced, others, spec = _parts(name, args)
        parts = [self._function(each, spec) for each in functions]
        with known_shapes([*first, *sliced, *others]):
            given = (*first, *(each[0] for each in sliced), *others)
            used, written, draws = self._used(parts, given)
            seeds = _seeds(sum(draws), [*given, *used, pred], sliced[0].shape[0] if sliced else None)
            at = len(first) + len(sliced) if seeds else None
            closed = [self._closed(part, given, used, at, sum(draws[:place])) for place, part in enumerate(parts)]
            if _share_memory([*first, *sliced, *others, *used], written):
                self._fail(
                    "A function that control flow is given writes memory that it is given twice.",
                    "Have it return the new value instead.",
                )
            first, sliced, others, used = _apart(first, sliced, others, used)
            if name == "while_loop":
                closed[0] = _only_result(closed[0])
                closed[1] = _with_next_seed(closed[1], at, sum(draws))
            more = (*others, *used)
            match name:
                case "cond":
                    result = run(pred, *closed, (*first, *seeds, *more))
                case "while_loop":
                    result = run(*closed, (*first, *seeds), more)[: len(first)]
                case "scan":
                    result = run(*closed, first, [*sliced, *seeds], more)
                case _:
                    result = run(*closed, [*sliced, *seeds], more)
        assert parts[-1].made is not None, "the operator has run it"
        return tree_unflatten(list(result), parts[-1].made)

    def _used(self, parts: Sequence[_Function], given: Sequence[Any]) -> tuple[list[Tensor], set[int], list[int]]:
        """Return what these functions use beside what they are given; which memory they write; what each draws."""
        used = _Used([each for each in self._replaced if isinstance(each, _Used)])
        written: set[int] = set()
        draws: list[int] = []
        self._replaced.append(used)
        try:
            for part in parts:
                used.others.clear()
                drawn = DrawnFrom()
                run_apart(part if self.draws_by_generator else _drawing(part, drawn), given)
                draws.append(drawn.number)
                changed = [given[place] for place in part.written]
                changed += [used.tensors[key] for key, each in used.others.items() if each._version]
                written.update(map(storage_id, changed))
        finally:
            self._replaced.pop()
        own = {*map(id, given)}
        return [each for key, each in used.tensors.items() if key not in own], written, draws

    def _function(self, function: Callable[..., Any], spec: TreeSpec | None) -> _Function:
        return _Function(function, spec, self)

    def _closed(
        self, part: _Function, own: Sequence[Any], used: list[Tensor], at: int | None, first: int
    ) -> Callable[..., Any]:
        """A function that is given what it uses after its own arguments.

        Args:
            part: It.
            own: Its arguments.
            used: What it uses.
            at: Where it is given a seed, if it is.
            first: The number of what it draws first.
        """
        known = [*own, *used]
        around = [*self._replaced]

        def call(*given: Any) -> Any:
            run: Callable[..., Any] = part
            if at is not None:
                run = _drawing(part, DrawnFrom(given[at], first))
                given = (*given[:at], *given[at + 1 :])
            before = self._replaced  # autograd runs a function within another one again when that one has ended
            self._replaced = [*around, {id(each): new for each, new in zip(known, given, strict=True)}]
            try:
                return run(*given[: len(own)])
            finally:
                self._replaced = before

        return call


class _Used:
    """Stands in for tensors of the graph that is being traced, in a function that is run apart from it.

    Args:
        around: What stands in where a function runs within another.

    Attributes:
        tensors: Those that were used, by id.
        others: What stands for them, by id.
    """

    def __init__(self, around: Sequence[_Used]) -> None:
        self._around = around
        self.tensors: dict[int, Tensor] = {}
        self.others: dict[int, Tensor] = {}
        self._is_recorded = is_recorded()

    def of(self, tensor: Tensor) -> Tensor:
        """Return what stands for a tensor, or what it is itself."""
        if id(tensor) not in self.others:
            stand_ins = (other for each in self._around for other in each.others.values())
            is_one = any(tensor is other for other in stand_ins)  # made while an inner function runs, perhaps
            if not isinstance(tensor, FakeTensor) or not (is_one or self._is_recorded(tensor)):
                return tensor
            self.tensors[id(tensor)] = tensor
            like = {"dtype": tensor.dtype, "device": tensor.device}
            with DisableTorchFunction():  # of PyTorch's own class, as one that the tracer of another function made
                self.others[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), **like)
        return self.others[id(tensor)]


class _Function:
    """A function of the user's on flat arguments, with flat results.

    Attributes:
        made: The structure of its results, once it has run.
        written: Positions of the arguments that it has written.
    """

    def __init__(self, function: Callable[..., Any], spec: TreeSpec | None, flows: Flows) -> None:
        self._function, self._spec, self._flows = function, spec, flows
        self.made: TreeSpec | None = None
        self.written: set[int] = set()

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        args = given if self._spec is None else tree_unflatten(list(given), self._spec)
        twins, before = self._flows._twins, _versions(given)
        with self._flows._on():
            leaves, self.made = tree_flatten(twins.fakes_in(self._function(*twins.reals_in(args))))
        self.written.update(place for place, version in enumerate(_versions(given)) if version != before[place])
        return tuple(self._flows.replaced(twins.fakes_in(leaf)) for leaf in leaves)


def _parts(name: str, args: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any], list[Any], list[Any], TreeSpec | None]:
    """The condition, the functions, operands that are carried, sliced and others, and how ``cond`` gives its own."""
    match name:
        case "cond":
            pred, yes, no, operands = args
            leaves, spec = tree_flatten(tuple(operands))
            return pred, [yes, no], leaves, [], [], spec
        case "while_loop":
            goes_on, turn, carried, others = args
            return None, [goes_on, turn], [*carried], [], [*others], None
        case "scan":
            turn, carried, sliced, others = args
            return None, [turn], [*carried], [*sliced], [*others], None
        case _:
            function, sliced, others = args
            return None, [function], [], [*sliced], [*others], None


def _versions(given: Sequence[Any]) -> list[Any]:
    return [each._version if isinstance(each, Tensor) else None for each in given]


def _share_memory(operands: Sequence[Any], written: set[int]) -> bool:
    """Return whether two of these lie in memory that is written."""
    found = [storage_id(each) for each in operands if isinstance(each, Tensor)]
    return any(found.count(each) > 1 for each in written)


def _apart(*groups: Sequence[Any]) -> list[list[Any]]:
    """Operands of which no two share memory, which PyTorch refuses: copies where they would."""
    seen: set[int] = set()
    found: list[list[Any]] = []
    for group in groups:
        found.append([])
        for each in group:
            is_shared = isinstance(each, Tensor) and storage_id(each) in seen
            found[-1].append(each.clone() if is_shared else each)
            if isinstance(each, Tensor):
                seen.add(storage_id(each))
    return found


def _seeds(num_draws: int, tensors: Sequence[Any], turns: int | None) -> list[Tensor]:
    """A seed for functions that draw so many numbers; one for each turn where their number is known."""
    if not num_draws:
        return []
    device = next(each.device for each in tensors if isinstance(each, Tensor))
    return [new_seed(device, num_draws, turns)]


def _drawing(function: Callable[..., Any], drawn: DrawnFrom) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with drawn:
            return function(*given)

    return call


def _with_next_seed(function: Callable[..., Any], at: int | None, num_draws: int) -> Callable[..., Any]:
    """A turn of a loop, which also returns the seed for the next one."""
    return function if at is None else lambda *given: (*function(*given), given[at] + num_draws)


def _only_result(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given)[0]


def why_not_a_body(node: fx.Node, root: torch.nn.Module, *, in_backward: bool) -> str:
    """Say why the functions of an operator that was recorded are no part of a graph; empty where they are."""
    modules = [getattr(root, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    inner = [each for module in _within(modules) for each in module.graph.nodes]
    constants = [each.graph.owning_module for each in inner if each.op == "get_attr"]
    for each, owner in zip([each for each in inner if each.op == "get_attr"], constants, strict=True):
        if isinstance(getattr(owner, str(each.target), None), FakeTensor):
            return "use a tensor in a way that is not seen"
    seeded = torch.Tag.nondeterministic_seeded
    if in_backward and any(seeded in getattr(each.target, "tags", ()) for each in inner):
        return "draw random numbers, which PyTorch draws again in the backward pass"
    return ""


def _within(modules: Sequence[Any]) -> list[fx.GraphModule]:
    graphs = [each for module in modules for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [*dict.fromkeys(graphs)]
