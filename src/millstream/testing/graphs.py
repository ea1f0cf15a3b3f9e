"""Graphs made for tests: random ones, and regular shapes whose best schedule is known."""

from __future__ import annotations

import random
from dataclasses import replace

from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role, validate_graph

_SIZES = (0, 4, 100, 512, 4096, 65536, 1 << 20)
_KINDS = (KernelKind.FUSED, KernelKind.FUSED, KernelKind.FUSED, KernelKind.GEMM, KernelKind.CONV, KernelKind.COPY)


def random_graph(
    rng: random.Random,
    num_kernels: int = 50,
    *,
    locality: float = 0.7,
    views: float = 0.2,
    in_place: float = 0.15,
    operators: float = 0.15,
    device: str = "cuda:0",
) -> KernelGraph:
    """Make a valid graph with inputs, states, constants, views, in-place updates and operators that allocate.

    Args:
        rng: Source of all chance: the same state gives the same graph.
        num_kernels: How many kernels, at least one.
        locality: Probability that a read takes one of the youngest buffers; low values give wide graphs.
        views: Probability that an access goes through a new view of the buffer.
        in_place: Probability that a kernel also updates a buffer that exists.
        operators: Probability that a kernel takes the memory of its results itself.
        device: Where everything lives.
    """
    return _RandomGraph(rng, locality, views, device).build(num_kernels, in_place, operators)


def chain_graph(num_kernels: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make a chain: every kernel reads what the one before it wrote, so that nothing can run side by side."""
    return towers_graph(1, num_kernels, num_bytes=num_bytes, device=device)


def towers_graph(num_towers: int, height: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make independent chains over one input, in program order tower by tower, each with an output of its own.

    On ``num_towers`` streams the best schedule takes the time of one tower.
    """
    buffers = [Buffer("x", num_bytes, device, Role.INPUT)]
    kernels: list[Kernel] = []
    outputs = []
    for tower in range(num_towers):
        read = "x"
        for level in range(height):
            role = Role.OUTPUT if level == height - 1 else Role.TEMPORARY
            written = f"y{tower}" if role is Role.OUTPUT else f"t{tower}.{level}"
            buffers.append(Buffer(written, num_bytes, device, role))
            kernel = Kernel(
                id=len(kernels),
                name=f"tower{tower}_{level}",
                kind=KernelKind.FUSED,
                device=device,
                reads=(read,),
                writes=(written,),
                num_bytes=2 * num_bytes,
                source=f"towers.py:{level + 1} in forward",
            )
            kernels.append(kernel)
            read = written
        outputs.append(read)
    return KernelGraph(f"{num_towers} towers of {height}", tuple(kernels), tuple(buffers), ("x",), tuple(outputs))


class _RandomGraph:
    """A graph in the making; the roles of temporaries and outputs are told apart only at the end."""

    def __init__(self, rng: random.Random, locality: float, views: float, device: str) -> None:
        self.rng = rng
        self.locality = locality
        self.views = views
        self.device = device
        self.buffers: list[Buffer] = []
        self.alive: list[Buffer] = []  # owners of memory with defined contents
        self.kernels: list[Kernel] = []

    def build(self, num_kernels: int, in_place: float, operators: float) -> KernelGraph:
        rng = self.rng
        inputs = [self.add("x", Role.INPUT) for _ in range(rng.randint(1, 3))]
        inputs += [self.add("p", Role.STATE) for _ in range(rng.randint(0, 4))]
        rng.shuffle(inputs)
        self.alive += [*inputs, *(self.add("c", Role.CONSTANT) for _ in range(rng.randint(0, 2)))]
        for _ in range(num_kernels):
            self.add_kernel(in_place, operators)
        made = [buffer for buffer in self.alive if buffer.role is Role.TEMPORARY]
        kept = rng.sample(made, min(len(made), rng.randint(1, 3)))
        self.buffers = [replace(buffer, role=Role.OUTPUT) if buffer in kept else buffer for buffer in self.buffers]
        outputs = [self.access(buffer) for buffer in kept]
        graph = KernelGraph(
            "random",
            tuple(self.kernels),
            tuple(self.buffers),
            tuple(buffer.id for buffer in inputs),
            (*outputs, *outputs[:1]),  # one is returned twice
        )
        validate_graph(graph)
        return graph

    def add(self, prefix: str, role: Role, alias_of: Buffer | None = None) -> Buffer:
        any_size = self.rng.randint(1, _SIZES[-1])
        num_bytes = alias_of.num_bytes if alias_of else self.rng.choice((*_SIZES, any_size, any_size, any_size))
        alias = alias_of.id if alias_of else None
        buffer = Buffer(f"{prefix}{len(self.buffers)}", num_bytes, self.device, role, alias)
        self.buffers.append(buffer)
        return buffer

    def access(self, buffer: Buffer) -> str:
        """Name a buffer, or a new view of it, or a view of a view."""
        while self.rng.random() < self.views:
            buffer = self.add("v", Role.TEMPORARY, alias_of=buffer)
        return buffer.id

    def choose(self) -> Buffer:
        youngest = self.alive[-4:] if self.rng.random() < self.locality else self.alive
        return self.rng.choice(youngest)

    def add_kernel(self, in_place: float, operators: float) -> None:
        rng = self.rng
        reads = [self.access(self.choose()) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5)))]
        writes = []
        if rng.random() < in_place:
            target = self.choose()
            if target.role is not Role.CONSTANT:
                writes.append(self.access(target))
                if rng.random() < 0.7:  # otherwise it overwrites without reading
                    reads.append(writes[0])
        made = [self.add("t", Role.TEMPORARY) for _ in range(rng.choice((1, 1, 1, 1, 2)) if not writes else 0)]
        writes += [buffer.id for buffer in made]
        self.alive += made
        kind = rng.choice(_KINDS)
        allocates = tuple(buffer.id for buffer in made) if rng.random() < operators else ()
        number = len(self.kernels)
        kernel = Kernel(
            id=number,
            name=f"extern_op_{number}" if allocates else f"triton_{kind}_{number}",
            kind=KernelKind.LIBRARY if allocates else kind,
            device=self.device,
            reads=tuple(reads),
            writes=tuple(writes),
            allocates=allocates,
            num_bytes=rng.choice(_SIZES),
            flops=rng.choice((0, 0, 1000, 10**9)),
            ops=tuple(rng.sample(("add", "mul", "relu", "sum", "mm"), rng.randint(0, 3))),
            source=f"model.py:{number + 10} in forward" if rng.random() < 0.8 else "",
        )
        self.kernels.append(kernel)
