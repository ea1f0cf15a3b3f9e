"""The interface of a family of our own kernels to the rest of the library, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from millstream.graph import KernelKind
from millstream.kernels.launches import TritonLaunch
from millstream.kernels.nodes import has_channels_last, values
from millstream.passes.graph_pass import Pass
from millstream.program import Program


class NodeWriter(NamedTuple):
    """A function that computes a node of the wrapper into memory that it is given, as ``out``.

    Attributes:
        function: It.
        arguments: What else it takes.
        name: Of the kernel.
        kind: Of the kernel.
        ops: What it computes, if the node's own origins do not tell.
        last: Nodes that must have their channels last in memory.
        contiguous: Nodes that must lie in memory without gaps, their last dimension first.
        join: The concatenation of which it writes a part, if any.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    name: str
    kind: KernelKind = KernelKind.CONV
    ops: tuple[str, ...] = ()
    last: tuple[torch.fx.Node, ...] = ()
    contiguous: tuple[torch.fx.Node, ...] = ()
    join: torch.fx.Node | None = None

    @property
    def fits(self) -> bool:
        """Whether tensors lie in memory as it reads and writes them."""
        return has_channels_last(*values(self.last)) and all(each.is_contiguous() for each in values(self.contiguous))


class Epilogue(NamedTuple):
    """What a generated kernel does to the result of a library's, which another kernel of the library does at once.

    Attributes:
        of: What computes the library's result alone.
        result: That, as a node of the wrapper.
        added: What else is read.
        output: What the generated kernel writes.
        function: Computes both.
        arguments: Of that, nodes for tensors.
        name: Put after the kernel's.
        ops: Likewise.
    """

    of: Callable[..., None]
    result: torch.fx.Node
    added: torch.fx.Node
    output: torch.fx.Node
    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    name: str
    ops: tuple[str, ...]


class Grouping(NamedTuple):
    """The way in which several of one kernel become one launch (``horizontal_fusion``).

    Attributes:
        alone: Computes one.
        task: One of it: the arguments of the function that computes it, and its ``out``.
        launches: How to compute several of one kind.
        together: Computes several.
        most_windows: Tasks that differ in their ``window`` only are of one kind; a launch takes so many windows.
        is_by_need: Whether they wait for nothing, so that those go together that are needed one after the other.
    """

    alone: Callable[..., None]
    task: Callable[..., Any]
    launches: Callable[[Sequence[Any]], Iterable[TritonLaunch]]
    together: Callable[..., None]
    most_windows: int = 1
    is_by_need: bool = False


@dataclass(frozen=True)
class Family:
    """Kernels of our own, and what is done for them before TorchInductor and after it. All but the name is optional.

    Graphs that are rewritten are of aten operators, for inference, and changed in place; their nodes carry their values
    in ``meta["val"]``.

    Attributes:
        name: Of it in ``MILLSTREAM_WITHOUT``.
        effect: What it does, in a few words.
        rewrite_images: Change a graph that has the channels of images last.
        rewrite: Change any graph, after those.
        operators: What these put in place of convolutions, for Inductor to lay out their images likewise.
        bind: Says what computes a node, if tensors lie in memory as they must.
        absorb: Says what a generated kernel of the wrapper could be part of.
        grouping: How several become one launch.
        fuse: Makes more or fewer kernels of a program's.
        launches: What else that program launches, to be compiled ahead.
        kernels: Names of its kernels, as a device knows them.
    """

    name: str
    effect: str
    rewrite_images: tuple[Pass[..., None], ...] = ()
    rewrite: tuple[Pass[..., None], ...] = ()
    operators: tuple[Any, ...] = ()
    bind: Callable[[torch.fx.Node], NodeWriter | None] | None = None
    absorb: Callable[[torch.fx.Node], Epilogue | None] | None = None
    grouping: Grouping | None = None
    fuse: Callable[[Program], Program] | None = None
    launches: Callable[[Program], Iterable[TritonLaunch]] | None = None
    kernels: frozenset[str] = frozenset()
