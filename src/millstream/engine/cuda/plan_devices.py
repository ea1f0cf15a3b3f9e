"""What a placed plan has on its devices: streams and arenas, beside those of the user's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream.device import DeviceContext, context, guard
from millstream.device.cuda_graphs.workspaces import take_workspaces
from millstream.engine.arena import bind_arenas
from millstream.graph import Launch, MemoryLayout, Plan
from millstream.program import Program

USABLE = 0.9
"""Of the memory that nobody has: workspaces, and gaps between what is there."""


def devices_of_streams(plan: Plan) -> dict[int, str]:
    """The device of each stream: the one that its kernels run on, and that copies copy to."""
    found: dict[int, str] = {}
    for step in plan.steps:
        if isinstance(step, Launch):
            found.setdefault(step.stream, plan.graph.kernels[step.kernel].device)
    return found


def room_on(device: str) -> int:
    """Bytes that a program may take on a GPU: those that nobody has, but for what libraries take by themselves."""
    index = torch.device(device).index
    with context(device).capture_lock:
        free, _ = torch.cuda.mem_get_info(index)
        cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return int(USABLE * (free + cached))


class PlanDevices:
    """Streams and memory of a plan on several GPUs. One call at a time, under the lock of ``home.graphs``.

    A stream is on the device that its kernels run on, a copy's on the device that it copies to: what a kernel writes
    is where its stream is.

    Args:
        program: Placed.
        plan: Of it.
        home: Of the user's device.

    Attributes:
        elsewhere: Contexts of the streams that are on other devices.
        bound: Where temporaries are; empty until they are bound.
    """

    def __init__(self, program: Program, plan: Plan, home: DeviceContext) -> None:
        self._program, self._plan, self._home = program, plan, home
        self.elsewhere = {
            stream: context(device) for stream, device in devices_of_streams(plan).items() if device != str(home.place)
        }
        self._others = tuple(dict.fromkeys(self.elsewhere.values()))
        self.bound: dict[str, torch.Tensor] = {}
        self._memory: list[torch.Tensor] = []
        self._pools: list[Any] = []  # what operators take by themselves in a captured graph lies there
        self._served: set[int] = set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the user's device current; afterwards every device has the stream that it had."""
        with ExitStack() as stack:
            for each in (*self._others, self._home):
                stack.enter_context(guard(each.place))
            yield

    def bind(self) -> dict[str, torch.Tensor]:
        """Take memory for temporaries, on each device in one piece; return where they are."""
        if not self.bound:
            self.bound = bind_arenas(self._program, self._plan, self._take)
        return self.bound

    def _take(self, layout: MemoryLayout) -> torch.Tensor:
        """Memory for one device, which no one gets after us before all our streams have come to the end of their work.

        It is taken on a stream that is ours, because PyTorch's allocator takes the default streams of two devices for
        one.
        """
        owner = next((each for each in self._others if str(each.place) == layout.device), self._home)
        with owner.on(owner.streams[0]):
            memory = torch.empty(layout.arena_bytes, dtype=torch.uint8, device=owner.torch_device)
        for stream in self._streams():
            if stream != owner.streams[0]:
                owner.driver.mark_use(memory.untyped_storage(), stream)
        event = owner.events.acquire()
        event.record(owner.streams[0])  # who had the memory before may be at work there
        self._home.current_stream().wait_event(event)
        owner.events.release(event)
        self._memory.append(memory)
        return memory

    def _streams(self) -> Iterator[Any]:
        for number in range(1, self._plan.num_streams):
            yield self.elsewhere.get(number, self._home).streams[number]

    def serve(self) -> None:
        """Keep the memory, when it is given back, from others until the current stream of the user's device is done."""
        handle = current_stream_handle(self._home.place.index)
        if handle not in self._served:
            self._served.add(handle)
            for memory in self._memory:
                self._home.driver.mark_use(memory.untyped_storage(), self._home.current_stream())

    def release(self) -> None:
        """Give all memory back."""
        self.bound, self._memory, self._pools, self._served = {}, [], [], set()

    # --- calls without a graph ---------------------------------------------------------------------------------------

    def hand_over(self, outputs: Sequence[Any]) -> None:
        """Let what comes next on any stream, and in memory of outputs, come after the work of the current one."""
        here = self._home.current_stream()
        event = self._home.events.acquire()
        event.record(here)
        for stream in self._streams():
            stream.wait_event(event)
        self._home.events.release(event)
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.is_cuda:
                output.record_stream(here)  # type: ignore[arg-type]

    # --- graphs ------------------------------------------------------------------------------------------------------

    def take_workspaces(self, at_home: Iterable[int] = ()) -> None:
        """Let workspaces of libraries stay where a graph has them, on all devices.

        Args:
            at_home: Numbers of streams of the user's device beside those of the plan.
        """
        for each in (self._home, *self._others):
            numbers = [n for n in range(self._plan.num_streams) if self.elsewhere.get(n, self._home) is each]
            take_workspaces(each, self._program, [*numbers, *at_home] if each is self._home else numbers)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """While a graph is captured, let what operators take by themselves on other devices be the graph's."""
        with ExitStack() as stack:
            for each in self._others:
                with guard(each.place):
                    pool = torch.cuda.MemPool()
                self._pools.append(pool)
                stack.enter_context(torch.cuda.use_mem_pool(pool, each.torch_device))
            yield
