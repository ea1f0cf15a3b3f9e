"""A lowered graph with the torch objects that run it.

``KernelGraph`` says what is read and written; ``Program`` adds what torch needs to do it: the callables, the exact
arguments, the views and the layouts. Every tensor in it is a *value* with a name: an input, a constant, a buffer, or a
view of one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from millstream._torch.dispatcher import is_users
from millstream._torch.modes.switches import present
from millstream._torch.tensors import reinterpret, tracked_view
from millstream.graph import KernelGraph

EMPTY: Callable[..., Any] = torch.ops.aten.empty_strided.default
"""What takes memory and writes nothing into it."""


WHOLE = "whole:"
"""How the name of a buffer begins that is there for the order of kernels alone: it stands for all of the inputs."""


@dataclass(frozen=True, slots=True)
class Value:
    """A reference to a tensor by name, inside the arguments of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of a tensor in memory: sizes and strides in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over the memory of ``base``, which is no view itself; ``offset`` counts elements from its start.

    With ``is_tracked``, autograd can see that it has changed with its base.
    """

    base: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_tracked: bool = False

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        return (tracked_view if self.is_tracked else reinterpret)(base, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The function that one kernel of the graph calls.

    Attributes:
        target: The callable.
        args: Positional arguments, nested in tuples and lists, tensors as ``Value``.
        kwargs: Keyword arguments, likewise.
        results: Buffers bound to what it returns: ``(index, name)``, index ``None`` for the whole result. Empty when it
            writes into its arguments only.
        stream_keyword: Name of the keyword through which it takes a raw stream handle, or empty for the current stream.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int | None, str], ...] = ()
    stream_keyword: str = ""


@dataclass(frozen=True)
class Program:
    """A kernel graph and everything torch needs to run it.

    Attributes:
        graph: What is read and written.
        calls: One per kernel, by kernel id.
        inputs: Value names in call order; ``None`` for an argument that is not a tensor.
        outputs: Result in order: a ``Value``, or a plain Python value.
        views: Views by value name.
        layouts: Allocations by buffer id.
        constants: Folded tensors by value name.
        mutated: Ids of the inputs that the program writes.
        aligned: Ids of the inputs whose first element kernels take to lie at a multiple of ``ALIGNMENT_BYTES``.
        tensors: How inputs, constants and buffers lie in their memory, where that is known.
        numbers: By position, inputs that are symbolic numbers; of a ``SymbolicProgram`` only.
        loops: In words, the loops in Python of which one turn was lowered.
    """

    graph: KernelGraph
    calls: tuple[KernelCall, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[Any, ...]
    views: dict[str, View]
    layouts: dict[str, TensorLayout]
    constants: dict[str, torch.Tensor]
    mutated: frozenset[str]
    aligned: frozenset[str]
    tensors: dict[str, TensorLayout]
    numbers: dict[int, Any] = field(default_factory=dict)
    loops: tuple[str, ...] = ()

    def base(self, name: str) -> str:
        """Return the input, constant or buffer that the value ``name`` lies in."""
        view = self.views.get(name)
        return name if view is None else view.base

    def layout(self, name: str) -> TensorLayout | None:
        """Return how a value lies in memory; ``None`` where nobody knows."""
        view, layout = self.views.get(name), self.tensors.get(self.base(name))
        return layout if view is None or layout is None else replace(layout, size=view.size, stride=view.stride)

    @cached_property
    def apart(self) -> frozenset[str]:
        """What operators of the user's are given: they see the whole memory that it lies in, and may keep it.

        So each has memory of its own in each call, as in eager PyTorch.
        """
        calls = [call for call in self.calls if is_users(call.target) or getattr(call.target, "keeps", False)]
        leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
        return frozenset(self.base(leaf.name) for leaf in leaves if isinstance(leaf, Value))

    def described(self, arguments: Iterable[Any]) -> list[Any]:
        """Return arguments of a call with fake tensors for values, which have layouts."""
        with FakeTensorMode():
            return [self._fake(arg.name) if isinstance(arg, Value) else arg for arg in arguments]

    def _fake(self, name: str) -> torch.Tensor:
        layout = self.layout(name)
        assert layout is not None, f"{name}, which one of our kernels uses, has a layout"
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)

    def code(self, kernel: int) -> str:
        """Return what decides how long a kernel takes, beside the sizes of its buffers: its source and arguments.

        What a library does depends on the present switches, such as the precision that is asked of it.
        """
        call = self.calls[kernel]
        source = getattr(getattr(getattr(call.target, "__self__", None), "fn", None), "src", "")
        source = source or getattr(call.target, "code", "")
        own = self.graph.kernels[kernel]
        source = source or f"{own.name} {present().digest(own.device.partition(':')[0])}"
        return f"{source}{self._shapes((call.args, call.kwargs))!r}"

    def _shapes(self, tree: Any) -> Any:
        if isinstance(tree, Value):
            layout = self.layout(tree.name)
            return (layout.dtype, layout.size, layout.stride) if layout else ()
        if isinstance(tree, dict):
            return {key: self._shapes(item) for key, item in tree.items()}
        return [self._shapes(item) for item in tree] if isinstance(tree, (list, tuple)) else tree

    @property
    def does_nothing(self) -> bool:
        """Whether no kernel writes anything, as for views and for batches without rows."""
        return not any(
            self.graph.buffer_of[name].num_bytes
            for kernel, call in zip(self.graph.kernels, self.calls, strict=True)
            if call.target is not EMPTY
            for name in kernel.writes
        )

    @property
    def devices(self) -> frozenset[str]:
        """Places that its kernels run on."""
        return frozenset(kernel.device for kernel in self.graph.kernels)


class Renaming:
    """The names of a program's values in another program, of which its kernels become a part.

    Args:
        prefix: Put before names.
        names: What values are that the other program has already.
        views: Of the other program.
    """

    def __init__(self, prefix: str, names: Mapping[str, str], views: Mapping[str, View]) -> None:
        self._prefix, self._names, self._views = prefix, names, views

    def value(self, name: str) -> str:
        """Return the name of a value."""
        return self._names.get(name) or self._prefix + name

    def buffer(self, name: str) -> str:
        """Return the name of a buffer: that in which the value lies."""
        if name.startswith("rng:"):
            return name
        if name.startswith("view:"):
            return f"view:{self._prefix}{name.removeprefix('view:')}"
        name = self.value(name)
        return self._views[name].base if name in self._views else name

    def buffers(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of buffers, each once."""
        return tuple(dict.fromkeys(map(self.buffer, names)))

    def view(self, view: View) -> View:
        """Return a view of what its base lies in."""
        base = self.value(view.base)
        outer = self._views.get(base)
        if outer is None:
            return replace(view, base=base)
        return replace(view, base=outer.base, offset=outer.offset + view.offset)

    def arguments(self, call: KernelCall) -> KernelCall:
        """Return a call with other names for what it takes."""
        args, kwargs = tree_map(
            lambda item: Value(self.value(item.name)) if isinstance(item, Value) else item, (call.args, call.kwargs)
        )
        return replace(call, args=args, kwargs=kwargs)
