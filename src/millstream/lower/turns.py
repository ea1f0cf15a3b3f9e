"""A loop's node in a program → the kernels of each of its turns.

**Contract**
- The program does what it did. A turn's kernels read what the graph or an earlier turn has made, and wait for nothing
  else; nothing is copied.
- It is lowered once, however many turns there are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream._torch.tensors import ALIGNMENT_BYTES
from millstream.errors import InternalError, LoweringError
from millstream.graph import Buffer, Kernel, KernelGraph, Role
from millstream.lower.inductor.generated_kernels import NativeKernel
from millstream.lower.operators import may_raise
from millstream.passes.equal_turns import layout_of
from millstream.passes.rolling import TURNS, TurnBody, Turns, begin_of, describe, turns_of
from millstream.program import WHOLE, KernelCall, Program, Renaming, Value, View


class BoundTurns:
    """What a kernel calls that stands for a loop, until it is put in its place.

    Args:
        turns: The loop.
        body: A turn, lowered.

    Raises:
        LoweringError: The body cannot be bound.
    """

    def __init__(self, turns: Turns, body: Program) -> None:
        self.turns, self.body = turns, body
        for item, (size, stride, dtype, _) in zip(body.outputs, turns.body.made, strict=True):
            layout = body.layout(item.name) if isinstance(item, Value) else None
            if layout is None or (layout.size, layout.stride, layout.dtype) != (size, stride, dtype):
                raise _refusal(turns, "a result does not lie in memory as it should")
        if body.mutated:
            raise _refusal(turns, "it writes what it is given")
        kernels, placeholders = body.graph.kernels, turns.body.graph.graph.find_nodes(op="placeholder")
        strides = [node.meta["val"].stride() for node in placeholders]
        self.given = {
            source: stride
            for sources in turns.sources
            for source, stride in zip(sources, strides, strict=True)
            if source >= 0
        }
        self.ops = tuple(dict.fromkeys(op for kernel in kernels for op in kernel.ops))
        self.may_raise = any(
            call.target.may_raise if isinstance(call.target, NativeKernel) else may_raise(call.target)
            for call in body.calls
        )
        self.num_bytes = len(turns.sources) * sum(kernel.num_bytes for kernel in kernels)
        self.flops = len(turns.sources) * sum(kernel.flops for kernel in kernels)

    def __call__(self, *_: Any) -> Any:
        raise InternalError(f"{self.turns} was not put in its place.")

    @property
    def __name__(self) -> str:
        return str(self.turns)


LOOP = "a loop in Python"
"""What errors name where the graph can be lowered without such nodes."""

Lower = Callable[[fx.GraphModule, list[Any]], Program]
"""Lowers the graph of a turn, with examples of its inputs."""


def lower_turns(gm: fx.GraphModule, lower: Lower) -> dict[str, BoundTurns]:
    """Lower the loops that a graph has nodes for, by name.

    Raises:
        LoweringError: One cannot be lowered as one.
    """
    found: dict[str, BoundTurns] = {}
    bodies: dict[str, Program] = {}
    for node in gm.graph.find_nodes(op="call_function", target=TURNS):
        given, name = node.args
        # Inductor may lay out what it computes anew, but for operators that say how they are given it: by this name.
        node.meta["eager_input_vals"] = (([each.meta["val"] for each in given], name), {})
        turns = turns_of(name)
        if turns.body.name not in bodies:
            mode = detect_fake_mode([each.meta["val"] for each in given])
            assert mode is not None, "graphs are lowered with fake values"
            bodies[turns.body.name] = _lowered(turns.body, lower, mode)
        found[name] = BoundTurns(turns, bodies[turns.body.name])
    return found


def _lowered(body: TurnBody, lower: Lower, mode: FakeTensorMode) -> Program:
    graph = copy.deepcopy(body.graph.graph)
    inputs = [(layout_of(each), begin_of(each)) for each in graph.find_nodes(op="placeholder")]
    describe(graph, inputs, mode)  # another graph of another trace may have the same loop
    output = graph.output_node()  # of which Inductor keeps the strides
    output.meta["user_visible_output_idxs"] = list(range(len(body.made)))
    output.meta["original_output_strides"] = [stride for _, stride, *_ in body.made]
    return lower(fx.GraphModule(body.graph, graph), [each.meta["val"] for each in graph.find_nodes(op="placeholder")])


def _refusal(turns: Turns, what: str) -> LoweringError:
    return LoweringError(f"{turns} is not lowered as one: {what}.", construct=LOOP)


def bind_turns(program: Program) -> Program:
    """Put the kernels of each turn in the place of loops.

    Raises:
        LoweringError: Kernels of the program or of a loop cannot read what they would be given.
    """
    if not any(isinstance(call.target, BoundTurns) for call in program.calls):
        return program
    return _Binder(program).run()


class _Binder:
    """Makes a program in which turns are kernels."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kernels: list[Kernel] = []
        self._calls: list[KernelCall] = []
        self._buffers = {buffer.id: buffer for buffer in program.graph.buffers}
        self._views, self._layouts, self._tensors = dict(program.views), dict(program.layouts), dict(program.tensors)
        self._constants, self._aligned = dict(program.constants), set(program.aligned)
        self._turns: dict[str, tuple[BoundTurns, int]] = {}  # by body: how many there are

    def run(self) -> Program:
        program = self._program
        for kernel, call in zip(program.graph.kernels, program.calls, strict=True):
            if isinstance(call.target, BoundTurns):
                self._bind(kernel, call, call.target)
            else:
                self._add(self._over_buffers(kernel), call)
        returned = tuple(map(self._base, program.graph.outputs))
        bare = KernelGraph(program.graph.name, (), tuple(self._buffers.values()))
        owners = set(map(bare.storage, returned))
        graph = replace(
            program.graph,
            kernels=tuple(self._kernels),
            buffers=tuple(_with_role(buffer, owners) for buffer in bare.buffers),
            outputs=returned,
        )
        return replace(
            program,
            graph=graph,
            calls=tuple(self._calls),
            views=self._views,
            layouts=self._layouts,
            tensors=self._tensors,
            constants=self._constants,
            aligned=frozenset(self._aligned),
            loops=(*program.loops, *(_told(bound, count) for bound, count in self._turns.values())),
        )

    def _add(self, kernel: Kernel, call: KernelCall) -> None:
        self._kernels.append(replace(kernel, id=len(self._kernels)))
        self._calls.append(call)

    def _base(self, name: str) -> str:
        return self._views[name].base if name in self._views else name

    def _over_buffers(self, kernel: Kernel) -> Kernel:
        """A kernel of the program, of which results of loops may have become parts of other buffers."""
        reads, writes = (tuple(dict.fromkeys(map(self._base, names))) for names in (kernel.reads, kernel.writes))
        is_same = (reads, writes) == (kernel.reads, kernel.writes)
        return kernel if is_same else replace(kernel, reads=reads, writes=writes)

    def _bind(self, kernel: Kernel, call: KernelCall, bound: BoundTurns) -> None:
        turns, body = bound.turns, bound.body
        _, before = self._turns.get(turns.body.name, (bound, 0))
        self._turns[turns.body.name] = bound, before + len(turns.sources)
        given = [value.name for value in call.args[0]]
        whole = tuple(name for name in kernel.reads if name.startswith(WHOLE))
        wanted = {turns.results[index]: name for index, name in call.results if index is not None}
        loop = f"loop{kernel.id}_"
        for name, constant in body.constants.items():
            self._constants[loop + name] = constant
        results: list[str] = []
        for number, sources in enumerate(turns.sources):
            names = {name: loop + name for name in body.constants}
            for name, source in zip(body.inputs, sources, strict=True):
                if name is not None:
                    names[name] = given[source] if source >= 0 else results[~source]
                    if name in body.aligned:
                        self._align(names[name], turns)
            own = [wanted.get(len(results) + place) for place in range(len(turns.body.made))]
            for item, result in zip(body.outputs, own, strict=True):  # the memory of results has their names
                if result is not None and item.name not in body.views and item.name not in names:
                    names[item.name] = result
            _Turn(self, f"{loop}{number}_", names, whole).copy(body)
            made = [names.get(item.name, f"{loop}{number}_{item.name}") for item in body.outputs]
            shared = Counter(self._base(name) for name, result in zip(made, own, strict=True) if result is not None)
            shared.update(map(self._base, names.values()))  # what it is given, and constants
            for result, name, (size, stride, *_) in zip(own, made, turns.body.made, strict=True):
                if result is not None and result != name:
                    others = (each for each in self._program.graph.kernels if each is not kernel)
                    if shared[self._base(name)] > 1 and any(result in each.writes for each in others):
                        raise _refusal(turns, "a result that shares memory is written")
                    self._let_lie(result, name, size, stride)
            results += made

    def _align(self, name: str, turns: Turns) -> None:
        """Kernels take this value to be aligned."""
        base = self._base(name)
        view, layout = self._views.get(name), self._tensors.get(base)
        if view is not None and (layout is None or view.offset * layout.dtype.itemsize % ALIGNMENT_BYTES):
            raise _refusal(turns, "a turn is given what begins within another tensor")
        if base in self._program.inputs:
            self._aligned.add(base)

    def _let_lie(self, result: str, name: str, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """Let a result be a view of what a turn has made."""
        self._tensors.pop(result, None)
        del self._buffers[result]
        view = self._views.get(name)
        base, offset = (name, 0) if view is None else (view.base, view.offset)
        self._views[result] = View(base, size, stride, offset)
        for other, over in self._views.items():
            if over.base == result:
                self._views[other] = replace(over, base=base, offset=over.offset + offset)


def _told(bound: BoundTurns, count: int) -> str:
    source = next((kernel.source for kernel in bound.body.graph.kernels if kernel.source), "")
    where = f" ({source})" if source else ""
    number = bound.turns.body.num_operators
    return f"{count} equal iterations of a loop{where} are lowered as one, of {number} operators"


class _Turn:
    """Copies the kernels of one turn."""

    def __init__(self, binder: _Binder, prefix: str, names: dict[str, str], whole: tuple[str, ...]) -> None:
        self._binder, self._whole = binder, whole
        self._renaming = Renaming(prefix, names, binder._views)

    def copy(self, body: Program) -> None:
        binder = self._binder
        for name, view in body.views.items():
            binder._views[self._renaming.value(name)] = self._renaming.view(view)
        for buffer in body.graph.buffers:
            if buffer.id not in body.inputs:
                name = self._renaming.buffer(buffer.id)
                alias = None if buffer.alias_of is None else self._renaming.buffer(buffer.alias_of)
                role = Role.CONSTANT if buffer.role is Role.CONSTANT else Role.TEMPORARY
                binder._buffers[name] = replace(buffer, id=name, alias_of=alias, role=role)
        for table, entries in ((binder._layouts, body.layouts), (binder._tensors, body.tensors)):
            own = ((name, entry) for name, entry in entries.items() if name not in body.inputs)
            table.update((self._renaming.value(name), entry) for name, entry in own)
        for kernel, call in zip(body.graph.kernels, body.calls, strict=True):
            binder._add(self._kernel(kernel), self._call(call))

    def _kernel(self, kernel: Kernel) -> Kernel:
        return replace(
            kernel,
            reads=(*self._renaming.buffers(kernel.reads), *self._whole),
            writes=self._renaming.buffers(kernel.writes),
            allocates=self._renaming.buffers(kernel.allocates),
            parts=self._renaming.buffers(kernel.parts),
        )

    def _call(self, call: KernelCall) -> KernelCall:
        results = tuple((index, self._renaming.value(name)) for index, name in call.results)
        return replace(self._renaming.arguments(call), results=results)


def _with_role(buffer: Buffer, returned: set[str]) -> Buffer:
    if buffer.role is Role.TEMPORARY and buffer.id in returned:
        return replace(buffer, role=Role.OUTPUT)
    return buffer
