"""Control flow on the host: which bodies of a ``Control`` run, and what goes from one to the next.

A body is one text, like a plan of its own on one stream. On a CPU its temporaries lie in memory that stays from turn to
turn, so a turn costs what its kernels do, and a few µs; on a GPU PyTorch's allocator has them, and a decision waits for
the device. In a CUDA graph the device decides (``cuda/captured_flows.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from millstream._torch.tensors import ALIGNMENT_BYTES
from millstream.check import check_plan
from millstream.engine.arena import bind_arena
from millstream.engine.checked import wanted_check
from millstream.locks import ForkSafeLock
from millstream.lower.control_flow import Body, Control, Flow
from millstream.program import Program, TensorLayout
from millstream.schedule import assign_offsets, plan_serial

#: ``compile_plan``, which itself comes here for control flow within a body.
Compile = Callable[..., Callable[[list[Any]], list[Any]]]

#: Takes what a ``Control`` is given, and returns its results.
Run = Callable[[Sequence[Tensor]], list[Tensor]]


class _Prepared(NamedTuple):
    run: Run
    bodies: list[CompiledBody]


_prepared: WeakKeyDictionary[Control, _Prepared] = WeakKeyDictionary()


def prepare(control: Control, compile_plan: Compile) -> Run:
    """Make the function that runs it; engines of one program share it.

    Args:
        control: What to run.
        compile_plan: Makes functions of its bodies.
    """
    return _prepare(control, compile_plan).run


def _prepare(control: Control, compile_plan: Compile) -> _Prepared:
    if control not in _prepared:
        places = places_of_slices(control)
        bodies = [CompiledBody(body, compile_plan, tuple(places.values())) for body in control.bodies]
        _prepared[control] = _Prepared(make_runner(control, bodies, [*places]), bodies)
    return _prepared[control]


def rehearse(program: Program, compile_plan: Compile) -> None:
    """Run every body in a program once, on zeros, that this thread has not run.

    A body is captured whether or not it was ever needed, and what is captured must have run before: kernels are tuned,
    and libraries make their handles. Bodies write nothing but their results.
    """
    for call in program.calls:
        if isinstance(call.target, Control):
            for compiled in _prepare(call.target, compile_plan).bodies:
                compiled.rehearse()
            for body in call.target.bodies:
                rehearse(body.program, compile_plan)


class _Rehearsal(threading.local):
    is_on = False  # then control flow within a body does not run: ``rehearse`` comes to it, too


_rehearsal = _Rehearsal()


def places_of_slices(control: Control) -> dict[int, str]:
    """Results of a scan's or map's body that are written where they are stacked: positions, and which buffers."""
    found: dict[int, str] = {}
    for body in control.bodies if control.num_sliced else ():
        stacks = enumerate(control.results[control.num_carried :], control.num_carried)
        rows = {place: (each.size[1:], each.stride[1:], each.dtype) for place, each in stacks if _are_aligned(each)}
        found |= places_of(body, rows)
    return found


def _are_aligned(stack: TensorLayout) -> bool:
    """Whether every slice begins where a kernel on its device may take a tensor of its own to begin."""
    return stack.device.type == "cpu" or stack.stride[0] * stack.dtype.itemsize % ALIGNMENT_BYTES == 0


def places_of(body: Body, wanted: Mapping[int, tuple[Any, ...]]) -> dict[int, str]:
    """Results of a body that can be written into memory that is given: positions, and which buffers they are.

    Args:
        body: Of a program whose results are all tensors.
        wanted: The sizes, strides and dtype of that memory, by position.
    """
    found: dict[int, str] = {}
    for place in wanted.keys() - body.copied:
        name = body.program.outputs[place].name
        layout = body.program.layouts.get(name)
        if layout is not None and (layout.size, layout.stride, layout.dtype) == wanted[place]:
            found[place] = name
    return found


class CompiledBody(ForkSafeLock):
    """A body that can be called, by one thread at a time.

    Args:
        body: What it computes.
        compile_plan: Makes its function.
        placed: Buffers for which memory is given.
        copies: Whether results that share memory, or lie in another way than wanted, are copied.
    """

    def __init__(self, body: Body, compile_plan: Compile, placed: tuple[str, ...] = (), *, copies: bool = True) -> None:
        super().__init__()
        self._placed = placed
        self._body, self._compile = body, compile_plan
        self._relaid = [(place, body.given[place]) for place in sorted(body.relaid)]
        self._copied = [(place, body.made[place]) for place in sorted(body.copied) if copies]
        self._run: Callable[[list[Any]], list[Any]] | None = None
        self._thread = threading.local()  # has ``ran`` once it has

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
        self._thread.ran = True
        return results

    def rehearse(self) -> None:
        """Run it on zeros, unless this thread has run it; random generators stay as they are."""
        if getattr(self._thread, "ran", False):
            return
        layouts = [*self._body.given, *(self._body.program.layouts[name] for name in self._placed)]
        devices = {layout.device for layout in layouts if layout.device.type == "cuda"}
        _rehearsal.is_on = True
        try:
            with torch.random.fork_rng(devices):
                self([empty(layout).zero_() for layout in layouts])
        finally:
            _rehearsal.is_on = False

    def _prepare(self) -> Callable[[list[Any]], list[Any]]:
        program = self._body.program
        plan = plan_serial(program.graph)
        check_plan(plan)
        bound = bind_arena(program, assign_offsets(plan)) if program.devices == {"cpu"} else {}
        self._run = self._compile(program, plan, bound, observe=wanted_check(program), placed=self._placed)
        return self._run


def make_runner(control: Control, bodies: list[CompiledBody], placed: list[int]) -> Run:
    """Return what runs these bodies; it doesn't hold the control flow that it is kept for.

    Args:
        control: What it does.
        bodies: Its bodies.
        placed: Positions of results that are written where they are stacked.
    """
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
        stacks = [empty(layout) for layout in results[num_carried:]]
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

    run = {Flow.COND: branch, Flow.WHILE_LOOP: loop, Flow.SCAN: scan, Flow.MAP: scan}[control.flow]

    def run_or_rehearse(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [empty(layout).zero_() for layout in results] if _rehearsal.is_on else run(tensors)

    return run_or_rehearse


def empty(layout: TensorLayout) -> Tensor:
    """A tensor of a layout, with any values."""
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def _copy(tensor: Tensor, layout: TensorLayout) -> Tensor:
    return empty(layout).copy_(tensor)
