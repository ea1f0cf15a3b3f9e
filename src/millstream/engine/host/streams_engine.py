"""The streams engine: a plan on several streams without capture, for changing shapes and for debugging.

Every call issues all kernels again, so the host is usually the slowest part; what it shows is that the plan is right.
"""

from __future__ import annotations

from typing import Any

import torch

from millstream.device import DeviceContext, guard
from millstream.engine.engine import Engine
from millstream.engine.plan_source import CompiledPlan, compile_plan
from millstream.graph import Plan
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered


class StreamsEngine(Engine):
    """Runs a plan by issuing its kernels on the streams of one place.

    Memory comes from PyTorch's allocator, each buffer under the stream of its first writer. A block that is free again
    is reused on that stream only, and the plan frees it where that stream is after every use; what is left to the end
    is safe because all streams wait for each other there.

    Args:
        lowered: What to run; every kernel on the context's place.
        plan: On which streams.
        context: Lends the streams.
    """

    name = "streams"

    def __init__(self, lowered: Lowered, plan: Plan, context: DeviceContext) -> None:
        super().__init__(lowered, plan)
        self._guard = ForkSafeLock()  # the events serve one call at a time
        self._context = context
        self._run: CompiledPlan | None = None  # made by the first call: engines are built while PyTorch compiles

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with self._guard.lock, guard(self._context.place):
            if self._run is None:
                self._run = compile_plan(self.lowered.program, self.plan, context=self._context)
            here = self._context.current_stream()
            outputs = self._run(inputs)
            if self.plan.num_streams > 1:
                self._order_behind(here)
                self._hand_over(outputs, here)
            return outputs

    def _order_behind(self, here: Any) -> None:
        """Let whatever takes memory from the streams' pools next come after this call."""
        event = self._context.events.acquire()
        event.record(here)
        for index in range(1, self.plan.num_streams):
            self._context.streams[index].wait_event(event)
        self._context.events.release(event)

    def _hand_over(self, outputs: list[Any], here: Any) -> None:
        """Tell the allocator that outputs, whichever stream they were allocated on, are used on the caller's."""
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.is_cuda:
                output.record_stream(here)
