"""The reference engine: kernels one after another, on any device, without capture."""

from __future__ import annotations

from typing import Any

import torch

from millstream.device import guard
from millstream.engine.arena import Arena, bind_arena, bind_arenas
from millstream.engine.checked import wanted_check
from millstream.engine.engine import Engine
from millstream.engine.plan_source import CompiledPlan, compile_plan
from millstream.graph import Plan
from millstream.lower import Lowered
from millstream.schedule import assign_offsets


class SerialEngine(Engine):
    """Runs a one-stream plan by calling its kernels in order.

    On the CPU, temporaries live in one arena laid out once, so that a call allocates nothing but its outputs. On a GPU
    they come from PyTorch's allocator, which is free of cost there and shares memory with everything else. Where the
    environment asks for it, each kernel is checked; see ``checked``.

    Args:
        lowered: What to run.
        plan: Its plan on one stream.
        arena: Memory that it has in turn with others; its own where there is none.
    """

    name = "serial"

    def __init__(self, lowered: Lowered, plan: Plan, arena: Arena | None = None) -> None:
        super().__init__(lowered, plan)
        self.arena = arena or Arena()  # it serves one call at a time
        self._shares_memory = arena is not None
        devices = sorted(lowered.program.devices)
        self._place = next((name for name in devices if not name.startswith("cpu")), "cpu")
        self._check = wanted_check(lowered.program)
        self._run: CompiledPlan | None = (
            None  # made by the first call: engines are built while PyTorch compiles, among fake tensors
        )

    @property
    def shares_memory(self) -> bool:
        return self._shares_memory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._check is not None:
            self._check.check_inputs(inputs)
        if self._place != "cpu":
            with guard(self._place):  # the wrapper allocates on the current device
                return (self._run or self._prepare({}))(inputs)
        with self.arena.lock:
            return (self._run or self._prepare(self._bind()))(inputs)

    def release(self) -> None:
        """Give the arena back; the next call takes it again."""
        with self.arena.lock:
            self._run = None
            self.arena.give_back(self)

    def _bind(self) -> dict[str, torch.Tensor]:
        if len(self.plan.graph.devices) > 1:  # virtual ones, each with an arena of its own
            return bind_arenas(self.lowered.program, self.plan)
        layout = assign_offsets(self.plan)
        return bind_arena(self.lowered.program, layout, self.arena.take(layout.arena_bytes, layout.device, self))

    def _prepare(self, bound: dict[str, torch.Tensor]) -> CompiledPlan:
        self._run = compile_plan(self.lowered.program, self.plan, bound, observe=self._check)
        return self._run
