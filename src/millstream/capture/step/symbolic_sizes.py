"""Which sizes of a step's arguments are symbols of its graph, and for which calls a graph with symbols holds.

**Contract**
- The first sizes of a form of arguments are compiled as they are. A dimension that then changes is a symbol in the next
  graph, and so with ``dynamic=True`` are all dimensions from the first call on. 0 and 1 never are.
- A size that the program turns into a plain number has a graph of its own. Where that happens to several sizes of a
  dimension, it is no symbol any more, and padding is advised. (Once may be chance: ``x[:, 1:]`` is broadcast where one
  is left.)
- No size of a form for which symbols failed is a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from millstream._torch.compiler.symbols import guard_of
from millstream.capture.trace.numbers.sizes import TracedSizes
from millstream.capture.trace.request import Request, Traced

MOST_FORMS = 100
"""Forms of arguments of which sizes are remembered."""

MOST_FIXED = 3
"""Sizes of a dimension that may turn out to be plain numbers, before all of them are."""


def form_without_sizes(key: Any) -> Hashable:
    """What calls whose arguments differ in nothing but sizes have in common, from the key of one of them."""
    form, ambient, *metas = key
    return (form, ambient, *((len(shape), dtype, device, *rest) for shape, dtype, device, _, *rest in metas))


@dataclass
class _Form:
    """Calls whose arguments differ in nothing but sizes."""

    first: list[tuple[int, ...]]  # shapes of those that were captured first
    # argument and dimension of sizes that were another later
    changed: set[tuple[int, int]] = field(default_factory=set)
    # sizes that the program took for plain numbers
    fixed: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    refused: str = ""  # why none of the sizes can be a symbol


class ChangingSizes:
    """Decides which sizes of a step's arguments are symbols.

    Args:
        dynamic: ``None`` for those that were seen to change, ``True`` for all, ``False`` for none.
    """

    def __init__(self, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._forms: dict[Hashable, _Form] = {}

    def choose(self, key: Any, arguments: Sequence[Tensor]) -> dict[int, frozenset[int]]:
        """By argument, the dimensions that are symbols in a graph for this call."""
        if self._dynamic is False:
            return {}
        form = self._form_of(key, arguments)
        chosen: dict[int, set[int]] = {}
        for position, (argument, first) in enumerate(zip(arguments, form.first, strict=True)):
            marked = getattr(argument, "_dynamo_dynamic_indices", ())
            static = getattr(argument, "_dynamo_static_indices", ())
            for dimension, size in enumerate(argument.shape):
                place = position, dimension
                if size != first[dimension]:
                    form.changed.add(place)
                can_be = len(form.fixed.get(place, ())) < MOST_FIXED and not form.refused and dimension not in static
                is_wanted = self._dynamic or place in form.changed or dimension in marked
                if is_wanted and can_be and size > 1:
                    chosen.setdefault(position, set()).add(dimension)
        return {position: frozenset(dimensions) for position, dimensions in chosen.items()}

    def note_fixed(
        self, key: Any, arguments: Sequence[Tensor], names: Sequence[str], fixed: dict[tuple[int, int], str]
    ) -> str:
        """Note sizes that the program takes for plain numbers, by argument and dimension, and the lines where it does.

        Returns:
            What to do about it; empty as long as there are few of them.
        """
        form, advice = self._form_of(key, arguments), ""
        for (position, dimension), line in fixed.items():
            sizes = form.fixed.setdefault((position, dimension), set())
            sizes.add(arguments[position].shape[dimension])
            if len(sizes) == MOST_FIXED:
                where = f" at {line}" if line else ""
                name = names[position]
                advice = (
                    f"dimension {dimension} of {name} is compiled for each of its sizes, since the step makes a plain "
                    f"number of it{where} (len, int, range, a loop over rows). Use {name}.shape[{dimension}] as it is, "
                    "or pad to a few sizes: ms.feed(pad_to=...)."
                )
        return advice

    def refuse(self, key: Any, arguments: Sequence[Tensor], reason: str) -> None:
        """No size of calls like this is a symbol from now on."""
        self._form_of(key, arguments).refused = reason

    def _form_of(self, key: Any, arguments: Sequence[Tensor]) -> _Form:
        if len(self._forms) > MOST_FORMS:
            self._forms.clear()
        first = [tuple(argument.shape) for argument in arguments]
        return self._forms.setdefault(form_without_sizes(key), _Form(first))


class SizesFixed(Exception):  # noqa: N818 - a message to the step, which traces again
    """The program takes all sizes that change for plain numbers: the graph would serve one call's only."""


class NoSymbols(Exception):  # noqa: N818 - a message to the step, which compiles sizes one by one from now on
    """No graph with symbols can be had."""


def check_symbols(request: Request, traced: Traced) -> None:
    """Refuse symbols where more than sizes is taken from the first call.

    Raises:
        NoSymbols: Each call's sizes need a graph of their own.
    """
    if traced.gm.meta["exchanges"]:
        raise NoSymbols("gradients are reduced between processes")
    if not traced.asked.isdisjoint(map(id, request.arguments)):
        raise NoSymbols("the step reads more of an argument than its sizes, dtype and values")


class SizeGuard:
    """For which sizes a graph with symbols holds.

    Args:
        sizes: Of the trace.

    Attributes:
        dimensions: By argument, those that were to be symbols.
    """

    def __init__(self, sizes: TracedSizes) -> None:
        self.dimensions = sizes.dimensions
        self._sizes: TracedSizes | None = sizes
        self._holds: Callable[..., bool] = bool

    def settle(self, arguments: Sequence[Tensor]) -> None:
        """Nothing more is decided about sizes: the graph has been compiled, for a call with these arguments.

        Raises:
            NoSymbols: What was decided is not true of them.
        """
        assert self._sizes is not None
        self._holds = guard_of(self._sizes.mode, [*chain.from_iterable(self._sizes.shapes)])
        self._sizes = None
        if not self.hold(arguments):
            raise NoSymbols("what was decided is not true of the sizes it was decided for")

    def hold(self, arguments: Sequence[Tensor]) -> bool:
        """Whether what was decided about sizes holds for those of ``arguments``."""
        return self._holds(*numbers_of(arguments))


def numbers_of(arguments: Sequence[Tensor]) -> list[int]:
    """Sizes and strides, one after another."""
    return [number for argument in arguments for number in (*argument.shape, *argument.stride())]
