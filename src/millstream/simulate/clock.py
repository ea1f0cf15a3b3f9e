"""A plan on a virtual clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from millstream.cost import Costs, KernelCost
from millstream.errors import ArgumentError, PlanError
from millstream.graph import Launch, Plan, Record, Span, Step, Timeline, Wait

_DONE = 1e-6  # ns of work: less than any kernel has, more than what rounding leaves behind


def simulate(plan: Plan, costs: Costs, *, shared: bool = True, issue_ns: int = 0) -> Timeline:
    """Run a plan on a virtual clock.

    Model:
        - A stream works on one thing at a time, in the order in which it was issued.
        - A kernel takes its ``duration_ns`` while the device has room. When the kernels that run together would need
          more than the whole of its arithmetic units or of its memory bandwidth, those that use that resource slow down
          in proportion, so that nothing is gained by overfilling the device. Every kernel beside it takes another
          ``crowding`` of its time, also where there is room. Overall, running together never takes longer than to run
          one after another.
        - The device starts at most one kernel every ``start_ns``.
        - Devices have nothing in common; a copy from one to another is work of the link between them alone.
        - A stream that waits for another continues ``wait_ns`` after the event, or at once if that is past.
        - The run is over when stream 0 and all kernels are through.

    So the makespan is never below the critical path, nor, where the host takes no time, above the sum of all waits and
    all durations, each of which counts as ``start_ns`` where it is shorter.
    O(steps * streams) time. The same arguments give the same timeline.

    Args:
        plan: A valid plan; see ``validate_plan``.
        costs: Of its graph's kernels.
        shared: Whether kernels share their device; otherwise each runs as if alone.
        issue_ns: Time the host takes for each launch; 0 for a captured graph.

    Raises:
        ArgumentError: ``costs`` are those of another graph.
        PlanError: A ``Wait`` names an event that no earlier ``Record`` records.
    """
    if len(costs.kernels) != len(plan.graph.kernels):
        sizes = f"{len(costs.kernels)} kernels, graph {plan.graph.name!r} has {len(plan.graph.kernels)}"
        raise ArgumentError(f"the costs are those of {sizes}: estimate them for this graph")
    return _Clock(plan, costs, shared, issue_ns).run()


@dataclass(slots=True)
class _Running:
    """A kernel on the device."""

    kernel: int
    cost: KernelCost
    start_ns: int
    remaining_ns: float  # of work at full speed


class _Clock:
    """The state of all streams at one time."""

    def __init__(self, plan: Plan, costs: Costs, shared: bool, issue_ns: int) -> None:
        self.plan = plan
        self.costs = costs
        self.shared = shared
        self.now = 0
        links = plan.graph.links
        self.device_of = [links.get(kernel.id, (kernel.device,)) for kernel in plan.graph.kernels]
        self.next_start = dict.fromkeys(self.device_of, 0)  # when a device may start another kernel
        self.free_at = [0] * plan.num_streams  # when a stream may continue with its next step
        self.running: dict[int, _Running] = {}  # by stream
        self.recorded: dict[int, tuple[int, int]] = {}  # by event: when, and on which stream
        self.spans: list[Span] = []
        # What each stream has still to do, and when the host has issued it.
        self.queues: list[deque[tuple[Step, int]]] = [deque() for _ in range(plan.num_streams)]
        issued_ns = 0
        for step in plan.steps:
            if isinstance(step, Launch):
                issued_ns += issue_ns
            self.queues[step.stream].append((step, issued_ns))

    def run(self) -> Timeline:
        while True:
            self._take_steps()
            rates = self._rates()
            times = [self.now + math.ceil(r.remaining_ns / rates[s] - _DONE) for s, r in self.running.items()]
            times += [time for time, queue in zip(self.free_at, self.queues, strict=True) if queue and time > self.now]
            if not times:
                break
            self._pass_time(min(times), rates)
        for queue in self.queues:
            if queue and isinstance(queue[0][0], Wait):
                raise PlanError(f"the wait for event {queue[0][0].event} never ends: record the event before it")
        self.spans.sort(key=lambda span: (span.start_ns, span.stream))
        end_ns = max([self.free_at[0], *(span.end_ns for span in self.spans)])
        return Timeline(tuple(self.spans), self.plan.num_streams, end_ns)

    def _take_steps(self) -> None:
        """Let every stream take steps until it has something running or must wait."""
        progress = True
        while progress:  # an event recorded on one stream may let another go on
            progress = False
            for stream, queue in enumerate(self.queues):
                while queue and stream not in self.running and self._take(stream, *queue[0]):
                    queue.popleft()
                    progress = True

    def _take(self, stream: int, step: Step, issued_ns: int) -> bool:
        """Take one step on an idle stream; return False if it has to wait."""
        time = self.free_at[stream] = max(self.free_at[stream], issued_ns)
        if isinstance(step, Wait):
            if step.event not in self.recorded:
                return False
            recorded_at, origin = self.recorded[step.event]
            latency = self.costs.wait_ns if origin != stream else 0
            self.free_at[stream] = max(time, recorded_at + latency)
        elif isinstance(step, Record):
            self.recorded[step.event] = (time, stream)
        elif isinstance(step, Launch):
            device = self.device_of[step.kernel]
            time = self.free_at[stream] = max(time, self.next_start[device])
            if time > self.now:
                return False
            self.next_start[device] = time + self.costs.start_ns
            cost = self.costs.kernels[step.kernel]
            self.running[stream] = _Running(step.kernel, cost, time, float(cost.duration_ns))
        return True

    def _rates(self) -> dict[int, float]:
        """Return how fast each running kernel works, as a share of its speed when alone."""
        if not self.shared or len(self.running) <= 1:
            return dict.fromkeys(self.running, 1.0)
        if len(self.next_start) == 1:
            return self._rates_on_one(self.running)
        beside: dict[tuple[str, ...], dict[int, _Running]] = {}
        for stream, running in self.running.items():
            beside.setdefault(self.device_of[running.kernel], {})[stream] = running
        return {stream: rate for each in beside.values() for stream, rate in self._rates_on_one(each).items()}

    def _rates_on_one(self, beside: dict[int, _Running]) -> dict[int, float]:
        """Of kernels on one device."""
        count = len(beside)
        crowd = 1.0 + self.costs.crowding * (count - 1)
        compute = max(1.0, sum(r.cost.compute_share for r in beside.values()))
        memory = max(1.0, sum(r.cost.memory_share for r in beside.values()))
        if compute == memory == 1.0:
            return dict.fromkeys(beside, 1.0 / min(crowd, count))
        return {
            stream: 1.0
            / min(crowd * max(compute if r.cost.compute_share else 1.0, memory if r.cost.memory_share else 1.0), count)
            for stream, r in beside.items()
        }

    def _pass_time(self, time: int, rates: dict[int, float]) -> None:
        """Let running kernels work until ``time``, and end those that are through."""
        for stream, running in list(self.running.items()):
            running.remaining_ns -= (time - self.now) * rates[stream]
            if running.remaining_ns <= _DONE:
                name = self.plan.graph.kernels[running.kernel].name
                self.spans.append(Span(name, stream, running.start_ns, time, running.kernel))
                self.free_at[stream] = time
                del self.running[stream]
        self.now = time
