"""A result is no memory that the graph writes: neither an input's old value, nor a copy of its new one.

An operator that is made to work in place on an input leaves its result there. Where the graph returns that result, as
``y = x.clone(); y[0] = 1; x.zero_(); return y`` does once the clone is gone, the caller gets what is written there
later, by this call or the next one. So it does where the graph returns a copy that changes nothing (``x * 1``), or what
such a copy was made of: ``y = x.clone(); y[0] = 1; x.copy_(y); return y``.

Results that share memory with an input's new value since autograd, as a returned ``x`` or a view of it, stay as they
are: they stand for the input itself. So do values for the backward pass that share it, as in eager PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._inductor.fx_passes import joint_graph, post_grad

from millstream._torch.workarounds import Workaround, replaced
from millstream.lower.workarounds.post_grad.shared_storage import (
    before_reinplacing,
    clone,
    find_copies,
    find_homes,
    memory_of,
)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    with _keeping_results(joint_graph, "remove_no_ops"), _keeping_results(post_grad, "remove_noop_ops"):
        yield


@contextlib.contextmanager
def _lowering() -> Iterator[None]:
    with _keeping_results(post_grad, "remove_noop_ops"), before_reinplacing(_copy_old_results):
        yield


@contextlib.contextmanager
def _keeping_results(module: Any, name: str) -> Iterator[None]:
    """Have a pass that leaves out what changes nothing leave it in where a result has memory of its own by it."""
    leave_out = getattr(module, name)

    def leave_in_results(graph: Any, *args: Any) -> None:
        output = (graph.graph if isinstance(graph, fx.GraphModule) else graph).output_node()
        before, stored = [memory_of(value) for value in _results(output)], _stored(output)
        leave_out(graph, *args)
        now = _stored(output) - stored
        _change_results(output, lambda position, value: memory_of(value) is not before[position] or position in now)

    with replaced(module, name, leave_in_results):
        yield


def _copy_old_results(graph: fx.Graph) -> None:
    """Return copies of what may lie in inputs that get another value."""
    copies = find_copies(graph)
    homes = find_homes(graph, copies)
    new_values = {copy.written: memory_of(copy.value) for copy in copies}
    _change_results(graph.output_node(), lambda _, value: memory_of(value) is not new_values[homes[value]])


def _change_results(output: fx.Node, is_copied: Callable[[int, fx.Node], bool]) -> None:
    """Copy those results, of what may lie in inputs that are written, for which ``is_copied`` says so."""
    homes = find_homes(output.graph, find_copies(output.graph))
    results = [
        clone(value) if value in homes and is_copied(position, value) else value
        for position, value in enumerate(_results(output))
    ]
    if results != _results(output):
        output.args = (tuple(results) if isinstance(output.args[0], (list, tuple)) else results[0],)


def _stored(output: fx.Node) -> set[int]:
    """Positions of results that are what an input is written with, and no copy of it."""
    values = {memory_of(copy.value) for copy in find_copies(output.graph)}
    return {position for position, value in enumerate(_results(output)) if memory_of(value) in values}


def _results(output: fx.Node) -> list[Any]:
    results = output.args[0]
    return [*results] if isinstance(results, (list, tuple)) else [results]


WORKAROUND = Workaround(
    "pytorch#198094",
    "results that are the memory of state which is written, and change with it",
    lowering=_lowering,
    tracing=_tracing,
)
