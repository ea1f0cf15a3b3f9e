"""Control flow on the host: which bodies of a ``Control`` run, and what goes from one to the next.

A body is one text, like a plan of its own on one stream, and its temporaries lie in memory that stays from turn to
turn. So a turn costs what its kernels do, and a few µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from millstream.check import check_plan
from millstream.engine.arena import bind_arena
from millstream.engine.checked import wanted_check
from millstream.locks import ForkSafeLock
from millstream.lower.control_flow import Body, Control, Flow
from millstream.program import TensorLayout
from millstream.schedule import assign_offsets, plan_serial

#: ``compile_plan``, which itself comes here for control flow within a body.
Compile = Callable[..., Callable[[list[Any]], list[Any]]]

_prepared: WeakKeyDictionary[Control, Callable[[Sequence[Tensor]], list[Tensor]]] = WeakKeyDictionary()


def prepare(control: Control, compile_plan: Compile) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Make the function that runs it; engines of one program share it.

    Args:
        control: What to run.
        compile_plan: Makes functions of its bodies.
    """
    if control not in _prepared:
        places = _places(control)
        bodies = [_Body(body, compile_plan, tuple(places.values())) for body in control.bodies]
        _prepared[control] = _runner(control, bodies, [*places])
    return _prepared[control]


def _places(control: Control) -> dict[int, str]:
    """Results of a scan's or map's body that are written where they are stacked: positions, and which buffers."""
    found: dict[int, str] = {}
    for body in control.bodies if control.num_sliced else ():
        program = body.program
        for place in {*range(control.num_carried, len(control.results))} - body.copied:
            name, stack = program.outputs[place].name, control.results[place]
            layout = program.layouts.get(name)
            wanted = stack.size[1:], stack.stride[1:], stack.dtype
            if layout is not None and (layout.size, layout.stride, layout.dtype) == wanted:
                found[place] = name
    return found


class _Body(ForkSafeLock):
    """A body that can be called, by one thread at a time."""

    def __init__(self, body: Body, compile_plan: Compile, placed: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._placed = placed
        self._body, self._compile = body, compile_plan
        self._relaid = [(place, body.given[place]) for place in sorted(body.relaid)]
        self._copied = [(place, body.made[place]) for place in sorted(body.copied)]
        self._run: Callable[[list[Any]], list[Any]] | None = None

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        """Run it.

        Args:
            given: Its inputs, and the memory for the buffers that are placed; the list is emptied.
        """
        for place, layout in self._relaid:
            given[place] = _copy(given[place], layout)
        with self.lock:
            results = (self._run or self._prepare())(given)
        for place, layout in self._copied:
            results[place] = _copy(results[place], layout)
        return results

    def _prepare(self) -> Callable[[list[Any]], list[Any]]:
        program = self._body.program
        plan = plan_serial(program.graph)
        check_plan(plan)
        bound = bind_arena(program, assign_offsets(plan))
        self._run = self._compile(program, plan, bound, observe=wanted_check(program), placed=self._placed)
        return self._run


def _runner(control: Control, bodies: list[_Body], placed: list[int]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return what runs these bodies; it doesn't hold the control flow that it is kept for."""
    num_carried, num_sliced, results = control.num_carried, control.num_sliced, control.results

    def branch(tensors: Sequence[Tensor]) -> list[Tensor]:
        decides, *operands = tensors
        return bodies[0 if decides else 1](operands)

    def loop(tensors: Sequence[Tensor]) -> list[Tensor]:
        goes_on, turn = bodies
        carried, others = list(tensors[:num_carried]), tensors[num_carried:]
        has_turned = False
        while goes_on([*carried, *others])[0]:
            carried = turn([*carried, *others])
            has_turned = True
        return [
            each if has_turned and each.stride() == layout.stride else _copy(each, layout)
            for each, layout in zip(carried, results, strict=True)
        ]

    def scan(tensors: Sequence[Tensor]) -> list[Tensor]:
        (turn,) = bodies
        carried, others = list(tensors[:num_carried]), tensors[num_carried + num_sliced :]
        stacks = [_empty(layout) for layout in results[num_carried:]]
        places = zip(*(stack.unbind(0) for stack in stacks), strict=True) if stacks else iter(())
        slices = zip(*(each.unbind(0) for each in tensors[num_carried : num_carried + num_sliced]), strict=True)
        for parts in slices:
            rows = next(places, ())
            made = turn([*carried, *parts, *others, *(rows[each - num_carried] for each in placed)])
            carried = made[:num_carried]
            for row, value in zip(rows, made[num_carried:], strict=True):
                if value is not row:
                    row.copy_(value)
        carried = [
            each if each.stride() == layout.stride else _copy(each, layout)
            for each, layout in zip(carried, results[:num_carried], strict=True)
        ]
        return [*carried, *stacks]

    return {Flow.COND: branch, Flow.WHILE_LOOP: loop, Flow.SCAN: scan, Flow.MAP: scan}[control.flow]


def _empty(layout: TensorLayout) -> Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def _copy(tensor: Tensor, layout: TensorLayout) -> Tensor:
    return _empty(layout).copy_(tensor)
