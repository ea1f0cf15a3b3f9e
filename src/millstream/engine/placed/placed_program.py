"""A program on several devices: what it calls, where its kernels are placed and copies are among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from millstream._torch.dispatcher import is_users
from millstream.graph import Role
from millstream.placement import Constraints, Placement
from millstream.program import WHOLE, KernelCall, Program, TensorLayout, Value, View

_COPY = torch.ops.aten.copy_.default


def find_constraints(program: Program) -> Constraints:
    """Return what of a program must stay where it is.

    The user's operators, and memory that nobody knows how to copy.
    """
    graph = program.graph
    fixed = {
        kernel.id
        for kernel, call in zip(graph.kernels, program.calls, strict=True)
        if is_users(call.target) or getattr(call.target, "keeps", False)
    }
    unknown = {
        buffer.id
        for buffer in graph.buffers
        if (layout := program.tensors.get(buffer.id)) is None
        or _spanned(layout) * layout.dtype.itemsize != buffer.num_bytes
    }
    order_only = {name for name in unknown if name.startswith(WHOLE)}
    return Constraints(fixed, unknown - order_only, order_only)


class Devices:
    """What differs from one kind of device to another; here virtual ones of a CPU, which all have the same memory."""

    copy: Callable[..., Any] = _COPY
    stream_keyword = ""

    def move_call(self, call: KernelCall, device: str) -> KernelCall:  # noqa: ARG002
        """Return what does the same on another device."""
        return call

    def move_layout(self, layout: TensorLayout, device: str) -> TensorLayout:  # noqa: ARG002
        """Return the layout of the same tensor there."""
        return layout

    def move_constant(self, constant: torch.Tensor, device: str) -> torch.Tensor:  # noqa: ARG002
        """Return a constant of its own for a device."""
        return constant.clone()


def place_program(program: Program, placement: Placement, devices: Devices | None = None) -> Program:
    """Let a program call what a placement of its graph says, copies included.

    Args:
        program: On one device.
        placement: Of its graph.
        devices: How calls and memory get to others; by default virtual ones of a CPU.
    """
    return _Placing(program, placement, devices or Devices()).build()


class _Placing:
    """A placed program in the making."""

    def __init__(self, program: Program, placement: Placement, devices: Devices) -> None:
        self.program, self.placement, self.devices = program, placement, devices
        self.views = dict(program.views)

    def build(self) -> Program:
        program, placed = self.program, self.placement.graph
        calls = [
            self._copy(kernel.reads[0], kernel.writes[0]) if origin is None else self._call(kernel.id, origin)
            for kernel, origin in zip(placed.kernels, self.placement.origin, strict=True)
        ]
        known = {
            name: self.devices.move_layout(program.tensors[storage], placed.buffer_of[name].device)
            for name, storage in self.placement.copy_of.items()
        }
        outside = {name for kernel in placed.kernels for name in kernel.allocates}
        made = [b.id for b in placed.buffers if b.alias_of is None and b.role in (Role.TEMPORARY, Role.OUTPUT)]
        tensors = {
            name: self.devices.move_layout(layout, placed.buffer_of[name].device)
            if name in placed.buffer_of
            else layout
            for name, layout in program.tensors.items()
        } | known
        constants = {
            name: self.devices.move_constant(program.constants[storage], placed.buffer_of[name].device)
            for name, storage in self.placement.copy_of.items()
            if placed.buffer_of[name].role is Role.CONSTANT
        }
        return replace(
            program,
            graph=placed,
            calls=tuple(calls),
            views=self.views,
            layouts={name: self._layout(name, tensors) for name in made if name not in outside},
            constants=program.constants | constants,
            tensors=tensors,
        )

    def _layout(self, name: str, tensors: dict[str, TensorLayout]) -> TensorLayout:
        """How a buffer lies where it is now."""
        if (known := self.program.layouts.get(name)) is None:
            return tensors[name]
        return self.devices.move_layout(known, self.placement.graph.buffer_of[name].device)

    def _call(self, kernel: int, origin: int) -> KernelCall:
        """Return what the kernel called, on the buffers that it has now."""
        old, new = self.program.graph.kernels[origin], self.placement.graph.kernels[kernel]
        pairs = zip((*old.reads, *old.writes), (*new.reads, *new.writes), strict=True)
        names = {before: after for before, after in pairs if before != after}
        call = self.program.calls[origin]
        if new.device != old.device:
            call = self.devices.move_call(call, new.device)
        if not names:
            return call

        def renamed(tree: Any) -> Any:
            return tree_map_only(Value, lambda value: Value(self._renamed(value.name, names)), tree)

        results = tuple((index, names.get(name, name)) for index, name in call.results)
        return replace(call, args=renamed(call.args), kwargs=renamed(call.kwargs), results=results)

    def _renamed(self, name: str, names: dict[str, str]) -> str:
        """The value in another buffer that stands for one in a buffer."""
        view = self.program.views.get(name)
        base = name if view is None else view.base
        if base not in names:
            return name
        if view is None:
            return names[base]
        made = f"{name}:{names[base]}"
        self.views[made] = replace(view, base=names[base])
        return made

    def _copy(self, source: str, target: str) -> KernelCall:
        """All elements between the first and the last, whatever their strides."""
        storage = self.placement.copy_of.get(target, target)
        spanned = _spanned(self.program.tensors[storage])
        flat = []
        for name in (target, source):
            self.views[f"flat:{name}"] = View(name, (spanned,), (1,), 0)
            flat.append(Value(f"flat:{name}"))
        return KernelCall(self.devices.copy, tuple(flat), {}, stream_keyword=self.devices.stream_keyword)


def _spanned(layout: TensorLayout) -> int:
    """Elements from the first to the last."""
    if 0 in layout.size:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
