"""Prove that a placement computes what its graph does, without knowing how it was made."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from millstream.errors import PlanError
from millstream.graph import CALLER_ROLES, PLANNED_ROLES, Kernel, KernelGraph, Launch, Plan, Role
from millstream.placement.crossing import Placement


def check_placement(graph: KernelGraph, placement: Placement, home: str, order_only: Collection[str] = ()) -> None:
    """Prove that a placement is right, or raise.

    Contract, for one that passes:
        - A kernel touches memory of its own device alone, but for copies, which take one buffer to one of the same size
          on another device.
        - What is the user's is on their device, once, and so are the results.
        - Each kernel of the graph is there once, and reads the same values as there: of every storage as many writes,
          by the same kernels, have been before. So are results and state in the end.

    That no kernel runs too early is a matter of the plan: ``check_plan`` proves that.

    Args:
        graph: What was placed.
        placement: Of it.
        home: The user's device.
        order_only: Storages that are no memory; see ``Constraints``.

    Raises:
        PlanError: The message names the kernel and the buffer.
    """
    placed = placement.graph
    users = {buffer.id for buffer in graph.buffers if buffer.role in CALLER_ROLES}
    for buffer in placed.buffers:
        is_users = buffer.role in CALLER_ROLES
        if is_users and buffer.id not in users:
            raise PlanError(f"buffer {buffer.id!r} on {buffer.device} is the user's a second time", buffer=buffer.id)
        if (is_users or buffer.role is Role.OUTPUT) and buffer.alias_of is None and buffer.device != home:
            raise PlanError(f"buffer {buffer.id!r} is the user's, and is on {buffer.device}", buffer=buffer.id)
    if (placed.inputs, placed.outputs) != (graph.inputs, graph.outputs):
        raise PlanError("the placement has other inputs or outputs than the graph")
    seen = sorted(origin for origin in placement.origin if origin is not None)
    if seen != list(range(len(graph.kernels))):
        raise PlanError("the placement has not every kernel of the graph once")
    for kernel in placed.kernels:
        _check_devices(placed, kernel, order_only)
    _check_values(graph, placement)


def check_streams(plan: Plan) -> None:
    """Prove that each stream belongs to one device, or to one direction of one link, or raise.

    Raises:
        PlanError: The message names the kernel.
    """
    first: dict[int, tuple[str, ...]] = {}
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Launch):
            continue
        kernel = plan.graph.kernels[step.kernel]
        device = plan.graph.links.get(kernel.id, (kernel.device,))
        if first.setdefault(step.stream, device) != device:
            text = f"{kernel.label} runs on {' → '.join(device)}, and stream {step.stream} is of "
            raise PlanError(text + " → ".join(first[step.stream]), kernel=kernel.name, step=position)


def _check_devices(placed: KernelGraph, kernel: Kernel, order_only: Collection[str]) -> None:
    if kernel.id in placed.links:
        source, target = (placed.buffer_of[placed.storage(name)] for name in (*kernel.reads, *kernel.writes))
        if source.num_bytes != target.num_bytes or target.role is Role.CONSTANT:
            text = f"{kernel.label} copies {source.id!r} to {target.id!r}, which is no buffer to copy it to"
            raise PlanError(text, kernel=kernel.name, buffer=target.id)
        return
    for name in (*kernel.reads, *kernel.writes):
        if (device := placed.buffer_of[name].device) != kernel.device and name not in order_only:
            text = f"{kernel.label} on {kernel.device} uses {name!r}, which is on {device}: a copy is missing"
            raise PlanError(text, kernel=kernel.name, buffer=name)


def _check_values(graph: KernelGraph, placement: Placement) -> None:
    """Run both on made-up values: what a storage holds tells by which kernels it was written, in which order."""
    numbers: dict[Hashable, int] = {}
    wanted, found = _StorageHistory(graph, {}, numbers), _StorageHistory(placement.graph, placement.copy_of, numbers)
    before: dict[int, dict[str, int]] = {}
    for kernel in graph.kernels:
        before[kernel.id] = wanted.launch(kernel.id, kernel.id)
    for kernel, origin in zip(placement.graph.kernels, placement.origin, strict=True):
        if origin is None and kernel.id not in placement.graph.links:
            raise PlanError(f"{kernel.label} is no kernel of the graph, and copies nothing", kernel=kernel.name)
        if origin is None:
            found.copy(kernel.id)
        elif (touched := found.launch(kernel.id, origin)) != before[origin]:
            buffer = next((name for name, value in touched.items() if before[origin].get(name) != value), None)
            text = f"{kernel.label} meets another value of {buffer!r} than in the program"
            raise PlanError(text, kernel=kernel.name, buffer=buffer)
    for storage in map(graph.storage, (*graph.inputs, *graph.outputs)):
        if found.value(storage) != wanted.value(storage):
            raise PlanError(f"{storage!r} has another value in the end than by the program", buffer=storage)


class _StorageHistory:
    """The contents of a graph's storages, as numbers: equal ones stand for the same history."""

    def __init__(self, graph: KernelGraph, copy_of: Mapping[str, str], numbers: dict[Hashable, int]) -> None:
        self.graph, self.copy_of, self.numbers = graph, copy_of, numbers
        self.held: dict[str, int] = {}

    def value(self, storage: str) -> int:
        """Return what a storage holds; before its first write, nothing, or what the user or the graph has put there."""
        if storage not in self.held:
            owns = self.graph.buffer_of[storage].role not in PLANNED_ROLES
            self.held[storage] = self._number(self.copy_of.get(storage, storage) if owns else None)
        return self.held[storage]

    def launch(self, kernel: int, origin: int) -> dict[str, int]:
        """Let a kernel write; return what the storages that it touches held, by their names in the program."""
        reads, writes = self.graph.touched_by[kernel]
        met = {storage: self.value(storage) for storage in (*reads, *writes)}
        self.held |= {storage: self._number((origin, met[storage])) for storage in writes}
        return {self.copy_of.get(storage, storage): value for storage, value in met.items()}

    def copy(self, kernel: int) -> None:
        """Let a copy write."""
        (source,), (target,) = self.graph.touched_by[kernel]
        self.held[target] = self.value(source)

    def _number(self, history: Hashable) -> int:
        return self.numbers.setdefault(history, len(self.numbers))
