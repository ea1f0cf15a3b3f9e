"""Parts of a Triton kernel that are equal but for the names of buffers are written once.

An operator of lists, as an optimizer's, is one kernel with a part for each item: loops along one axis, without sums.
``equal_kernels.py`` tells how the rest of a graph's kernels are.

Private APIs of Inductor's code generation; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from millstream.lower.inductor.once.bindings import (
    Bound,
    Line,
    NotedArguments,
    arguments_form,
    bind,
    read_lines,
    write_lines,
)
from millstream.lower.inductor.once.forms import BufferNumbers, UnknownFormError, form_of

SETS = ("removed_buffers", "inplaced_to_remove", "mutations")
_STATE = ("numels", "tiling_scores", "persistent_reduction", "cooperative_reduction", "no_x_dim", "index_dtype")
_MORE_STATE = ("fixed_config", "inside_reduction", "optimize_mask", "hint_override", "is_native_matmul")


def state_of(kernel: Any) -> Hashable:
    """Return what a Triton kernel is written from besides its loops."""
    return tuple(repr(getattr(kernel, name, None)) for name in (*_STATE, *_MORE_STATE))


@dataclass(frozen=True)
class _TritonPart:
    """Code that the loops of a part have added to it, and to the arguments of the whole kernel.

    Attributes:
        bound: Those arguments.
        lines: By the name of the buffer for lines that they are in.
        names: Of the sets of names that it has, which buffers are in them.
        counts: Numbers that it counts.
        used: How many variables of each kind it has; they are numbered through all parts.
    """

    bound: Bound
    lines: Mapping[str, tuple[Line, ...]]
    names: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]
    used: Mapping[str, int]


_TEXTS = ("body", "loads", "compute", "stores")
_COUNTS = ("num_load", "num_store")
_OF_WRITING = frozenset({"store_buffer_names", "node_to_bounds", "range_tree_nodes", "outside_loop_vars"}) | {
    "_load_counts",
    "inplace_update_buffers",
    *SETS,
}
"""What else of a part changes while its loops are written, and is of no account after that."""


class TritonParts:
    """The parts of the graphs that are compiled."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, _TritonPart | None]] = WeakKeyDictionary()

    def write(self, schedule: Sequence[Any], kernel: Any, write: Callable[[], None]) -> None:
        """Write a part as an equal one was, or else as it comes."""
        graph: Any = V.graph
        nodes, names = [*schedule], BufferNumbers()
        try:
            key = form_of(nodes, names), arguments_form(kernel.args, names), state_of(kernel), _part_state(kernel)
        except Exception:  # noqa: BLE001  what private parts raise where a kernel is not of a known form: it has its own code
            write()
            return
        known = self._known.setdefault(graph.scheduler, {})
        part = known.get(key)
        if part is not None:
            _take_part(kernel, part, [*names.number], [*names.offset])
            return
        arguments, first, before = NotedArguments(kernel.args), _next_variables(kernel), _sizes(kernel)
        write()
        known[key] = _note_part(kernel, arguments, names, first, before)


def _part_state(kernel: Any) -> Hashable:
    """What else a part is written from.

    Raises:
        UnknownFormError: It is not of a known form.
    """
    texts = tuple(repr(line) for name in _TEXTS for line in getattr(kernel, name)._lines)
    axes = [tree.prefix for tree in kernel.active_range_trees()]
    if axes != ["x"] or kernel.inside_reduction or kernel.range_tree_nodes:
        raise UnknownFormError("axes")
    return texts, getattr(kernel, "per_subkernel_blocks", None)


def _next_variables(kernel: Any) -> dict[str, int]:
    """The numbers of the variables that come next, by what their names begin with."""
    counters = {"tmp": kernel.cse.iter_buffer_ids, "x": kernel.iter_vars_count}
    return {name: int(repr(counter).removeprefix("count(").removesuffix(")")) for name, counter in counters.items()}


def _sizes(kernel: Any) -> dict[str, Any]:
    """All of a part that can be seen to change: numbers, and how much is in what holds several."""
    found: dict[str, Any] = {}
    for name, value in vars(kernel).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
        elif hasattr(value, "_lines"):
            found[name] = len(value._lines), value._indent
        elif hasattr(value, "__len__"):
            found[name] = len(value)
    return found


def _note_part(
    kernel: Any, arguments: NotedArguments, names: BufferNumbers, first: Mapping[str, int], before: Mapping[str, Any]
) -> _TritonPart | None:
    """Return what a part has become; ``None`` where another cannot be made of that."""
    number = names.number
    with contextlib.suppress(Exception):  # likewise
        bound, after = arguments.end(names), _sizes(kernel)
        changed = {name for name in {*after, *before} if after.get(name) != before.get(name)}
        texts = {name: after[name][1] == before[name][1] for name in _TEXTS}
        if not changed <= {*_TEXTS, *_COUNTS, *_OF_WRITING} or not all(texts.values()):
            return None
        with V.set_kernel_handler(kernel):  # which knows the buffers that it has removed
            lines = {
                name: tuple(read_lines(getattr(kernel, name)._lines[before[name][0] :], kernel.args, names, first))
                for name in _TEXTS
            }
        used = {name: after - first[name] for name, after in _next_variables(kernel).items()}
        numbers = {kind: tuple(number[name] for name in getattr(kernel, kind)) for kind in SETS}
        return _TritonPart(bound, lines, numbers, {name: getattr(kernel, name) for name in _COUNTS}, used)
    return None


def _take_part(kernel: Any, part: _TritonPart, names: Sequence[str], offsets: Sequence[int]) -> None:
    """Make a part what an equal one was."""
    first = _next_variables(kernel)
    bind(kernel.args, part.bound, names, offsets)
    kernel.inplace_update_buffers |= {names[new]: names[old] for old, new in part.bound.in_place if new is not None}
    for kind, numbers in part.names.items():
        setattr(kernel, kind, OrderedSet(names[number] for number in numbers))
    for name, value in part.counts.items():
        setattr(kernel, name, value)
    for name, lines in part.lines.items():
        getattr(kernel, name)._lines += write_lines(lines, kernel.args, names, offsets, first)
    for name, counter in (("tmp", kernel.cse.iter_buffer_ids), ("x", kernel.iter_vars_count)):
        for _ in range(part.used[name]):
            next(counter)
