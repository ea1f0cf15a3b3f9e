"""Graphs made for tests: random ones, and regular shapes whose best schedule is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
    parts: float = 0.0,
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
        parts: Probability that a kernel, instead of anything new, writes a part of a buffer that exists.
        device: Where everything lives.
    """
    return _RandomGraph(rng, locality, views, parts, device).build(num_kernels, in_place, operators)


def chain_graph(num_kernels: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make a chain: every kernel reads what the one before it wrote, so that nothing can run side by side."""
    return towers_graph(1, num_kernels, num_bytes=num_bytes, device=device)


def towers_graph(num_towers: int, height: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make independent chains over one input, in program order tower by tower, each with an output of its own.

    On ``num_towers`` streams the best schedule takes the time of one tower.
    """
    shape = _Shape(num_bytes, device)
    outputs = []
    for tower in range(num_towers):
        end = "x"
        for level in range(height):
            end = shape.add_kernel(f"tower{tower}_{level}", [end])
        outputs.append(end)
    return shape.finish(f"{num_towers} towers of {height}", outputs)


def blocks_graph(rng: random.Random, num_blocks: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make a stack of blocks like Inception's: each splits into two to five branches that the next one joins again."""
    shape = _Shape(num_bytes, device)
    joined = shape.add_kernel("stem", ["x"])
    for block in range(num_blocks):
        ends = []
        for branch in range(rng.randint(2, 5)):
            end = joined
            for level in range(rng.randint(1, 4)):
                end = shape.add_kernel(f"block{block}_branch{branch}_{level}", [end], KernelKind.CONV)
            ends.append(end)
        joined = shape.add_kernel(f"block{block}_join", ends)
    return shape.finish(f"{num_blocks} blocks", [joined])


def wavefront_graph(num_layers: int, num_steps: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make an unrolled recurrent network: each cell needs the one below it and the one before it, and has four gates.

    Program order goes through the layers of one time step after another.
    """
    shape = _Shape(num_bytes, device)
    state: list[list[str]] = [[] for _ in range(num_layers)]
    for step in range(num_steps):
        below = "x"
        for layer in range(num_layers):
            needed = [below, *state[layer]]
            gates = [shape.add_kernel(f"gate{g}_{layer}_{step}", needed, KernelKind.GEMM) for g in range(4)]
            below = shape.add_kernel(f"cell_{layer}_{step}", gates)
            state[layer] = [below]
    return shape.finish(f"{num_layers} layers of {num_steps} steps", state[-1])


def training_graph(num_layers: int, *, num_bytes: int = 1024, device: str = "cuda:0") -> KernelGraph:
    """Make a training step: forward, then per layer the gradients of its input and its weight, and the update in place.

    Only the input gradients form a chain; a schedule that puts off weight gradients keeps all activations meanwhile.
    """
    shape = _Shape(num_bytes, device)
    weights = [shape.add_state(f"weight{layer}") for layer in range(num_layers)]
    activations = ["x"]
    for layer, weight in enumerate(weights):
        activations.append(shape.add_kernel(f"forward{layer}", [activations[-1], weight], KernelKind.GEMM))
    gradient = shape.add_kernel("loss", activations[-1:])
    for layer in reversed(range(num_layers)):
        weight_gradient = shape.add_kernel(f"wgrad{layer}", [gradient, activations[layer]], KernelKind.GEMM)
        if layer:
            gradient = shape.add_kernel(f"dgrad{layer}", [gradient, weights[layer]], KernelKind.GEMM)
        shape.add_kernel(f"update{layer}", [weight_gradient, weights[layer]], updates=weights[layer])
    return shape.finish(f"{num_layers} layers", [])


def data_parallel_graph(layers: Sequence[int], num_buckets: int = 1, *, device: str = "cuda:0") -> KernelGraph:
    """Make a training step whose gradients are exchanged: forward, backward, collectives, update.

    The backward pass writes each gradient into its part of a bucket, and the last layers' bucket is complete first.

    Args:
        layers: Bytes of each layer's parameters.
        num_buckets: At most so many, with about as many layers in each.
        device: Where everything lives.
    """
    depth = len(layers)
    bucket_of = {layer: (depth - 1 - layer) * min(num_buckets, depth) // depth for layer in range(depth)}
    members = [[i for i in reversed(range(depth)) if bucket_of[i] == b] for b in sorted(set(bucket_of.values()))]
    sizes = [sum(layers[i] for i in each) for each in members]
    act = max(layers)
    buffers = [Buffer("x", act, device, Role.INPUT), Buffer("communicator", 0, device, Role.STATE)]
    buffers += [Buffer(f"w{i}", layers[i], device, Role.STATE) for i in range(depth)]
    buffers += [Buffer(f"bucket{b}", size, device, Role.STATE) for b, size in enumerate(sizes)]
    for i in range(depth):
        buffers += [Buffer(f"a{i}", act, device, Role.TEMPORARY), Buffer(f"d{i}", act, device, Role.TEMPORARY)]
    kernels: list[Kernel] = []

    def add(name: str, kind: KernelKind, reads: Sequence[str], writes: Sequence[str], **more: Any) -> None:
        sizes_of = {buffer.id: buffer.num_bytes for buffer in buffers}
        moved = sum(sizes_of[each] for each in (*reads, *writes))
        kernels.append(Kernel(len(kernels), name, kind, device, tuple(reads), tuple(writes), num_bytes=moved, **more))

    for i in range(depth):
        add(f"forward{i}", KernelKind.GEMM, [f"a{i - 1}" if i else "x", f"w{i}"], [f"a{i}"])
    for i in reversed(range(depth)):
        after = f"d{i + 1}" if i + 1 < depth else f"a{i}"
        bucket = f"bucket{bucket_of[i]}"
        add(f"gradient{i}", KernelKind.GEMM, [after, f"a{i - 1}" if i else "x"], [bucket], parts=(bucket,))
        if i:
            add(f"backward{i}", KernelKind.GEMM, [after, f"w{i}"], [f"d{i}"])
    for b, each in enumerate(members):
        name = f"exchange bucket {b} of layers ({len(each)} of {depth} gradients)"
        both = [f"bucket{b}", "communicator"]
        add(name, KernelKind.COLLECTIVE, both, both, ops=("all_reduce",))
    for b, each in enumerate(members):
        parameters = [f"w{i}" for i in each]
        add(f"update{b}", KernelKind.FUSED, [f"bucket{b}", *parameters], parameters)
    used = {name for kernel in kernels for name in (*kernel.reads, *kernel.writes)}
    kept = tuple(buffer for buffer in buffers if buffer.id in used)
    inputs = tuple(buffer.id for buffer in kept if buffer.role in (Role.INPUT, Role.STATE))
    return KernelGraph(f"step of {depth} layers", tuple(kernels), kept, inputs)


class _Shape:
    """A graph of kernels that each read some buffers and write one, new or given."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        self.device = device
        self.kernels: list[Kernel] = []
        self.buffers = [Buffer("x", num_bytes, device, Role.INPUT)]

    def add_state(self, name: str) -> str:
        """Add a buffer of the user's and return its name."""
        self.buffers.append(Buffer(name, self.num_bytes, self.device, Role.STATE))
        return name

    def add_kernel(
        self, name: str, reads: list[str], kind: KernelKind = KernelKind.FUSED, *, updates: str | None = None
    ) -> str:
        """Add a kernel and return the buffer that it writes, by default a new one named after it."""
        written = updates or name
        if updates is None:
            self.buffers.append(Buffer(name, self.num_bytes, self.device, Role.TEMPORARY))
        kernel = Kernel(
            id=len(self.kernels),
            name=name,
            kind=kind,
            device=self.device,
            reads=tuple(reads),
            writes=(written,),
            num_bytes=(len(reads) + 1) * self.num_bytes,
            source=f"shape.py:{len(self.kernels) + 1} in forward",
        )
        self.kernels.append(kernel)
        return written

    def finish(self, name: str, outputs: list[str]) -> KernelGraph:
        """Return the graph."""
        buffers = tuple(replace(b, role=Role.OUTPUT) if b.id in outputs else b for b in self.buffers)
        inputs = tuple(b.id for b in buffers if b.role in (Role.INPUT, Role.STATE))
        return KernelGraph(name, tuple(self.kernels), buffers, inputs, tuple(outputs))


class _RandomGraph:
    """A graph in the making; the roles of temporaries and outputs are told apart only at the end."""

    def __init__(self, rng: random.Random, locality: float, views: float, parts: float, device: str) -> None:
        self.rng = rng
        self.locality = locality
        self.views = views
        self.parts = parts
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

    def owner(self, name: str) -> str:
        """Return whose memory a buffer is."""
        buffers = {buffer.id: buffer for buffer in self.buffers}
        while (alias := buffers[name].alias_of) is not None:
            name = alias
        return name

    def choose(self) -> Buffer:
        youngest = self.alive[-4:] if self.rng.random() < self.locality else self.alive
        return self.rng.choice(youngest)

    def add_kernel(self, in_place: float, operators: float) -> None:
        rng = self.rng
        reads = [self.access(self.choose()) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5)))]
        writes = []
        parts: tuple[str, ...] = ()
        if self.parts and rng.random() < self.parts:
            target = self.choose()
            if target.role is Role.TEMPORARY and target.id not in {self.owner(name) for name in reads}:
                writes.append(self.access(target))
                parts = tuple(writes)
        elif rng.random() < in_place:
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
            parts=parts,
            num_bytes=rng.choice(_SIZES),
            flops=rng.choice((0, 0, 1000, 10**9)),
            ops=tuple(rng.sample(("add", "mul", "relu", "sum", "mm"), rng.randint(0, 3))),
            source=f"model.py:{number + 10} in forward" if rng.random() < 0.8 else "",
        )
        self.kernels.append(kernel)
