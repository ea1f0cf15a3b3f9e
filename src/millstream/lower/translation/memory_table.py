"""The memory of a wrapper graph's values: what lies where, what a node touches of it, and how many bytes that is."""

from __future__ import annotations

from typing import Any

import torch

from millstream._torch.compiler.symbols import NUMBERS, simplified
from millstream.errors import LoweringError
from millstream.graph import Kernel
from millstream.lower.inductor.generated_kernels import GeneratedKernel
from millstream.lower.operators import (
    written_arguments,
)
from millstream.program import TensorLayout, View


class MemoryTable:
    """What memory the values of a wrapper graph have, by the names of their nodes.

    Attributes:
        views: Where those lie that are none by themselves.
        layouts: Of allocations that no kernel makes.
        bytes: Of buffers.
        device: Likewise.
        alias: Of buffers whose memory is that of others, these.
        fake: Tensors that lie as buffers do.
        filled: Allocations that some kernel has written so far.
    """

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.layouts: dict[str, TensorLayout] = {}
        self.bytes: dict[str, int] = {}
        self.device: dict[str, str] = {}
        self.alias: dict[str, str] = {}
        self.fake: dict[str, torch.Tensor] = {}
        self.filled: set[str] = set()

    def add(self, name: str, value: torch.Tensor) -> None:
        """A buffer with the memory of a tensor."""
        if value.layout is torch.strided:  # weights packed by oneDNN show no storage
            self.fake[name] = value
        self.bytes[name] = storage_bytes(value)
        self.device[name] = str(numbered(value.device))

    def allocate(self, node: torch.fx.Node, size: Any, stride: Any) -> None:
        """A buffer of the program's own."""
        size, stride = (tuple(map(plain_size, part)) for part in (size, stride))
        value = node.meta["val"]
        self.layouts[node.name] = TensorLayout(size, stride, value.dtype, numbered(value.device))
        self.add(node.name, value)

    def add_view(self, node: torch.fx.Node) -> None:
        """A view of what is there."""
        arguments: Any = node.args
        base, size, stride, offset = arguments
        size, stride, offset = tuple(map(plain_size, size)), tuple(map(plain_size, stride)), plain_size(offset)
        if not all(isinstance(n, (int, torch.SymInt)) for n in (*size, *stride, offset)):
            raise LoweringError(f"View {node.name} depends on a shape that is not known.", construct=node.name)
        # Offsets count from the start of the memory also for a view of a view, so the chain collapses to its base.
        root = self.views[base.name].base if base.name in self.views else base.name
        self.views[node.name] = View(root, size, stride, offset)

    def bind(self, node: torch.fx.Node, kernel: Kernel) -> None:
        """Make the tensor that an operator returned a buffer, an alias if it shares the memory of one it was given."""
        value = node.meta["val"]
        for name in dict.fromkeys((*kernel.reads, *kernel.writes)):
            if name in self.fake and self.fake[name].untyped_storage()._cdata == value.untyped_storage()._cdata:
                self.alias[node.name] = name
                break
        self.add(node.name, value)

    def accesses(self, node: torch.fx.Node, *, draws: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the bases of the values that a node reads and writes, results not included."""
        reads: dict[str, None] = {}
        writes: dict[str, None] = {}
        if isinstance(node.target, GeneratedKernel):
            for arg, use in zip(node.args, node.target.arguments, strict=True):
                if isinstance(arg, torch.fx.Node):
                    if use.reads:
                        reads[self.base(arg)] = None
                    if use.writes:
                        writes[self.base(arg)] = None
        else:
            written = written_arguments(node.target, node.args, node.kwargs)
            out = node.kwargs.get("out")
            for arg in node.all_input_nodes:
                if arg is not out:
                    reads[self.base(arg)] = None
            for arg in written:
                writes[self.base(arg)] = None
            if draws:
                # Random operators keep their program order: each moves the generator's state.
                generator = f"rng:{self.device_of(node, tuple(writes) + tuple(reads))}"
                self.bytes.setdefault(generator, 16)
                self.device.setdefault(generator, generator.removeprefix("rng:"))
                reads[generator] = writes[generator] = None
        for arg in node.all_input_nodes:
            if self.base(arg) in self.alias:
                reads[view_of(self.base(arg))] = None
        # A kernel that is the first to touch an allocation reads there only what it has written itself: parts, then the
        # whole.
        kept = tuple(name for name in reads if name not in writes or name in self.filled or name not in self.layouts)
        return kept, tuple(writes)

    def device_of(self, node: torch.fx.Node, names: tuple[str, ...]) -> str:
        """Where a kernel runs that touches these."""
        devices = {self.device[name] for name in names}
        accelerators = sorted(device for device in devices if device != "cpu")
        if len(accelerators) > 1:
            raise LoweringError(
                f"Kernel {node.name} uses several devices: {', '.join(accelerators)}.", construct=node.name
            )
        if accelerators:
            return accelerators[0]
        value = node.meta.get("val")
        return "cpu" if names or not isinstance(value, torch.Tensor) else str(value.device)

    def traffic(self, node: torch.fx.Node, writes: tuple[str, ...]) -> int:
        """Bytes of the views that a kernel touches, each once a direction."""
        total: Any = 0
        written = set(writes)
        for arg in node.all_input_nodes:
            value = arg.meta.get("val")
            if isinstance(value, torch.Tensor):
                base = self.base(arg)
                size: Any = torch.sym_min(value.numel() * value.element_size(), self.bytes[base])
                updated = (
                    isinstance(node.target, GeneratedKernel)
                    and base in written
                    and any(
                        use.reads and other is arg for other, use in zip(node.args, node.target.arguments, strict=True)
                    )
                )
                total += size * (2 if updated else 1)
        return total  # type: ignore[no-any-return]

    def base(self, node: torch.fx.Node) -> str:
        """The buffer in which a value lies."""
        return self.base_name(node.name)

    def base_name(self, name: str) -> str:
        """The same by name."""
        return self.views[name].base if name in self.views else name

    def owner(self, name: str) -> str:
        """The buffer whose memory one has."""
        while name in self.alias:
            name = self.alias[name]
        return name


def view_of(name: str) -> str:
    """Return what an operator makes that returns a view of memory that is there, as a buffer."""
    return f"view:{name}"


def numbered(device: torch.device) -> torch.device:
    """Name an accelerator by its number: a bare ``cuda`` is the current device."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def plain_size(number: Any) -> Any:
    """A size as a number, a symbolic one where it depends on symbols; what is no size stays."""
    if isinstance(number, torch.fx.Node) and number.op == "placeholder":  # a size is an input
        number = number.meta["val"] if isinstance(number.meta["val"], NUMBERS) else number
    return simplified(number)


def layout_of(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor."""
    return tuple(value.shape), value.stride()


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor."""
    if value.layout is not torch.strided:
        return value.numel() * value.element_size()
    last: Any = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if isinstance(last, torch.SymInt):
        return torch.sym_max(last + 1, 0) * value.element_size()  # type: ignore[no-any-return]
    return int(last + 1) * value.element_size() if value.numel() else 0
