"""Faults of PyTorch's compiler, and what is done about each: a module for each.

They are in folders by the stage of the compiler that they change: the graph as it was ``captured``, ``decompositions``
of operators, the ``joint_graph`` of forward and backward, either's graph ``post_grad``, ``lowerings`` of operators,
``scheduling`` of kernels, and ``codegen``, how they are written.

The list has all workarounds there are, also those for other parts of PyTorch, which are in ``millstream._torch``. Each
says which versions need it, can be switched off (``MILLSTREAM_WITHOUT=pytorch#185873,pytorch#197039``), and has a test
that fails as soon as PyTorch does without, so that it can go. All touch private parts of PyTorch, tried on the versions
that the package supports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from millstream._torch import recurrence
from millstream._torch.compiler import lookups
from millstream._torch.devices import capture_generators, device_guard
from millstream._torch.workarounds import Decompositions, Workaround, without
from millstream.lower.workarounds.captured import foreach_order
from millstream.lower.workarounds.codegen import (
    parts_of_buffers,
    pytorch_175860,
    pytorch_189895,
    pytorch_191837,
    pytorch_195402,
    pytorch_196681,
    pytorch_196728,
)
from millstream.lower.workarounds.decompositions import (
    expanded_scatter,
    fft_strides,
    pytorch_167313,
    pytorch_187173,
    pytorch_197094,
    pytorch_198119,
)
from millstream.lower.workarounds.joint_graph import (
    checkpointed_randoms,
    float_of_size,
    pytorch_133512,
    pytorch_183988,
    pytorch_184232,
    pytorch_187580,
    pytorch_195977,
    pytorch_197039,
    pytorch_198031,
)
from millstream.lower.workarounds.lowerings import (
    dropout_in_order,
    foreach_reads,
    pytorch_180848,
    pytorch_188084,
    pytorch_197829,
    pytorch_198101,
    second_writes,
)
from millstream.lower.workarounds.post_grad import pytorch_198094, pytorch_198131
from millstream.lower.workarounds.scheduling import (
    foreach_parts,
    pytorch_176591,
    pytorch_185873,
    pytorch_193061,
    pytorch_198270,
)
from millstream.passes.graph_pass import Pass

__all__ = [
    "WORKAROUNDS",
    "JointPasses",
    "Workaround",
    "decompose",
    "lowering",
    "mend_captured",
    "options",
    "tracing",
    "without",
]

WORKAROUNDS: tuple[Workaround, ...] = (
    lookups.WORKAROUND,
    device_guard.WORKAROUND,
    pytorch_133512.WORKAROUND,
    pytorch_167313.WORKAROUND,
    pytorch_175860.WORKAROUND,
    pytorch_176591.WORKAROUND,
    capture_generators.WORKAROUND,
    pytorch_180848.WORKAROUND,
    pytorch_183988.WORKAROUND,
    pytorch_184232.WORKAROUND,
    pytorch_185873.WORKAROUND,
    pytorch_187173.WORKAROUND,
    pytorch_187580.WORKAROUND,
    pytorch_188084.WORKAROUND,
    pytorch_189895.WORKAROUND,
    pytorch_191837.WORKAROUND,
    pytorch_193061.WORKAROUND,
    pytorch_195402.WORKAROUND,
    pytorch_195977.WORKAROUND,
    pytorch_196681.WORKAROUND,
    pytorch_196728.WORKAROUND,
    pytorch_197039.WORKAROUND,
    pytorch_197094.WORKAROUND,
    pytorch_198031.WORKAROUND,
    pytorch_198119.WORKAROUND,
    expanded_scatter.WORKAROUND,
    fft_strides.WORKAROUND,
    pytorch_197829.WORKAROUND,
    pytorch_198094.WORKAROUND,
    pytorch_198101.WORKAROUND,
    pytorch_198131.WORKAROUND,
    pytorch_198270.WORKAROUND,
    foreach_order.WORKAROUND,
    foreach_parts.WORKAROUND,
    foreach_reads.WORKAROUND,
    parts_of_buffers.WORKAROUND,
    second_writes.WORKAROUND,
    float_of_size.WORKAROUND,
    checkpointed_randoms.WORKAROUND,
    dropout_in_order.WORKAROUND,
    recurrence.WORKAROUND,
)

CAPTURED = tuple(
    Pass(each.issue, each.effect, each.captured_pass)
    for each in WORKAROUNDS
    if each.captured_pass is not None and each.is_needed
)
"""Passes over a graph as it was captured, in this order."""
JOINT = tuple(
    Pass(each.issue, each.effect, each.joint_pass)
    for each in WORKAROUNDS
    if each.joint_pass is not None and each.is_needed
)
"""Passes over the graph of forward and backward, in this order."""


def _applied() -> list[Workaround]:
    return [each for each in WORKAROUNDS if each.applies]


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Change Inductor's scheduling and code generation inside the ``with`` block. Not for several threads at once."""
    with contextlib.ExitStack() as stack:
        for each in _applied():
            stack.enter_context(each.lowering())
        yield


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Change Inductor's passes over the joint graph inside the ``with`` block. Not for several threads at once."""
    with contextlib.ExitStack() as stack:
        for each in _applied():
            stack.enter_context(each.tracing())
        yield


def mend_captured(gm: torch.fx.GraphModule) -> None:
    """Change a graph, before autograd, where PyTorch makes another program of it."""
    for each in CAPTURED:
        each(gm)


def decompose(table: Decompositions) -> dict[Any, Callable[..., Any]]:
    """Add the decompositions that Inductor gets wrong without to a table."""
    for each in _applied():
        table = each.decompose(table)
    return dict(table)


def options() -> dict[str, Any]:
    """Options under which Inductor is sound."""
    return {name: value for each in _applied() for name, value in each.options.items()}


class JointPasses(CustomGraphPass):  # type: ignore[misc]
    """Our passes over the joint graph, as Inductor takes them.

    Args:
        after: A pass of the user's, or several, that come after; ``None`` for none.
    """

    def __init__(self, after: Callable[[torch.fx.Graph], None] | list[Any] | tuple[Any, ...] | None) -> None:
        given = [] if after is None else [*after] if isinstance(after, (list, tuple)) else [after]
        self._passes = [*JOINT, *given]
        self.is_ours_alone = not given

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self._passes:
            each(graph)

    def uuid(self) -> Any:
        """Return what caches know the passes by."""
        applied = [each.issue for each in _applied()]  # which change what others make of a graph, too
        given = self._passes[len(JOINT) :]
        return (
            "millstream.workarounds",
            applied,
            [getattr(each, "uuid", lambda each=each: repr(each))() for each in given],
        )
