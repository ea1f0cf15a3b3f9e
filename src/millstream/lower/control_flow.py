"""Control flow as a kernel: what ``torch.cond``, ``while_loop``, ``scan`` and ``map`` are in a program.

A ``Control`` says which bodies there are, each a program of its own, and how what it is given reaches them; it runs
nothing (``engine/control.py`` does). Within a graph it is the operator ``millstream::control``, which Inductor takes
for any other operator of a library.

**Contract**
- It reads the tensors that it is given, and nothing else; it writes none of them.
- What it returns lies in memory of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from millstream.errors import InternalError
from millstream.program import Program, TensorLayout


class Flow(StrEnum):
    """The choice and number of bodies that run; named as PyTorch's operators are."""

    COND = "cond"  # the first or the second, by the first tensor
    WHILE_LOOP = "while_loop"  # the second, as long as the first says so of the carried values
    SCAN = "scan"  # the only one, once for each slice, with carried values
    MAP = "map_impl"  # likewise, without


EXPECTED_TURNS = 16
"""How often a loop is taken to turn whose length its values decide, where no measurement tells."""


@dataclass(frozen=True, slots=True)
class Body:
    """A function that an operator was given.

    Attributes:
        program: It, lowered.
        given: How its inputs lie in memory.
        relaid: Positions of the inputs that lie in another way where the operator is given them.
        made: How its results are to lie in memory.
        copied: Positions of the results that are copied: they share memory with something, or lie in another way.
    """

    program: Program
    given: tuple[TensorLayout, ...]
    relaid: frozenset[int]
    made: tuple[TensorLayout, ...]
    copied: frozenset[int]


@dataclass(frozen=True, eq=False)
class Control:
    """A call of an operator of control flow.

    Attributes:
        flow: What decides which bodies run.
        bodies: In the order of the operator's arguments.
        num_carried: Of a loop: so many of its first tensors have other values in each turn.
        num_sliced: Of a scan or map: so many of the tensors after these are given to the body slice by slice.
        turns: How often the body runs; 0 where values decide.
        given: How the tensors lie in memory that it is given.
        results: How they lie in memory.
    """

    flow: Flow
    bodies: tuple[Body, ...]
    num_carried: int
    num_sliced: int
    turns: int
    given: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]

    def __call__(self, *_: Any) -> NoReturn:
        raise InternalError(f"No engine has prepared {self.flow}.")

    @property
    def __name__(self) -> str:
        return str(self.flow)

    @property
    def draws(self) -> bool:
        """Whether a body moves the state of a random generator."""
        kernels = (kernel for body in self.bodies for kernel in body.program.graph.kernels)
        return any(name.startswith("rng:") for kernel in kernels for name in kernel.reads)

    @property
    def keeps(self) -> bool:
        """Whether a body gives what it is given to an operator of the user's, who may keep it."""
        return any(body.program.apart for body in self.bodies)

    @property
    def code(self) -> str:
        """What decides how long it takes, beside the sizes of its tensors."""
        codes = (body.program.code(kernel.id) for body in self.bodies for kernel in body.program.graph.kernels)
        return f"{self.flow} {self.turns} {' '.join(codes)}"

    @property
    def ops(self) -> tuple[str, ...]:
        """The operators in its bodies, for people."""
        return tuple(
            dict.fromkeys(op for body in self.bodies for kernel in body.program.graph.kernels for op in kernel.ops)
        )

    @property
    def num_bytes(self) -> int:
        """Memory traffic within the bodies, as far as it can be expected."""
        return self._expected([sum(kernel.num_bytes for kernel in body.program.graph.kernels) for body in self.bodies])

    @property
    def flops(self) -> int:
        """Floating-point operations, likewise."""
        return self._expected([sum(kernel.flops for kernel in body.program.graph.kernels) for body in self.bodies])

    def _expected(self, counts: Sequence[int]) -> int:
        """Of both ways of a branch, each is as likely."""
        if self.flow is Flow.COND:
            return sum(counts) // len(counts)
        return sum(counts) * (self.turns or EXPECTED_TURNS)


_controls: WeakValueDictionary[int, Control] = WeakValueDictionary()
_numbers = itertools.count()

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("control(Tensor[] tensors, int number) -> Tensor[]", tags=(torch.Tag.needs_exact_strides,))

CONTROL = torch.ops.millstream.control.default
"""``control(tensors, number)``: what the control flow of this number makes of tensors."""


def register(control: Control) -> int:
    """A number by which graphs may refer to it, as long as anybody holds it."""
    number = next(_numbers)
    _controls[number] = control
    return number


def control_of(args: Sequence[Any]) -> Control:
    """The control flow that a node of a graph with these arguments stands for."""
    return _controls[args[1]]


@torch.library.impl(_library, "control", "CompositeExplicitAutograd")
def _control(tensors: Sequence[Tensor], number: int) -> list[Tensor]:  # noqa: ARG001  as the operator has them
    return _controls[number]()


@torch.library.register_fake("millstream::control", lib=_library)
def _describe(tensors: Sequence[Tensor], number: int) -> list[Tensor]:  # noqa: ARG001  as above
    return [
        torch.empty_strided(each.size, each.stride, dtype=each.dtype, device=each.device)
        for each in _controls[number].results
    ]
