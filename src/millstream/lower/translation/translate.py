"""Wrapper FX graph → ``Program``.

**Contract**
- The kernels keep the order of the wrapper; every launch becomes exactly one kernel, every view none.
- A kernel's reads and writes cover every byte it touches, by whole buffers. Where an operator does not say, both are
assumed.
- Two values that share memory have the same base, or one is an alias of the other's buffer.

**Steps**: walk the nodes once; bind inputs and constants; turn allocations into layouts, ``as_strided`` into views,
everything else into a call with its reads and writes; then give each buffer its role.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from millstream._torch.compiler.symbols import NUMBERS, without_guards
from millstream._torch.tensors import ALIGNMENT_BYTES, realign
from millstream.errors import LoweringError
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.kernels.registry import find_epilogue, find_writer
from millstream.lower.control_flow import CONTROL, control_of
from millstream.lower.inductor.generated_kernels import GeneratedKernel, checks_indices
from millstream.lower.operators import (
    count_elementwise,
    count_flops,
    draws_random_numbers,
    kind_of,
    may_raise,
)
from millstream.lower.origins import op_names, told_by
from millstream.lower.translation.extra_orders import open_joined, order_checks
from millstream.lower.translation.memory_table import (
    MemoryTable,
    layout_of,
    numbered,
    plain_size,
    storage_bytes,
    view_of,
)
from millstream.lower.turns import LOOP, BoundTurns
from millstream.passes.rolling import TURNS
from millstream.program import EMPTY, WHOLE, KernelCall, Program, TensorLayout, Value, View

_PRETENDED = ("rng:", WHOLE)
"""How names of buffers begin that are no memory of the program's: generators, and that."""


def translate(
    gm: torch.fx.GraphModule,
    *,
    name: str,
    static: frozenset[int] = frozenset(),
    aligned: frozenset[int] = frozenset(),
    symbolic: bool = False,
    turns: Mapping[str, BoundTurns] | None = None,
) -> Program:
    """Turn the wrapper graph of TorchInductor into a program.

    Args:
        gm: What the FX wrapper produced.
        name: Name of the graph, for people.
        static: Positions of the inputs whose memory stays the same from call to call.
        aligned: Positions of the inputs that kernels take to be aligned.
        symbolic: Whether sizes may be symbolic numbers, which they then are in the program too. It has no kernels of
            our own, for these are chosen by size.
        turns: Loops by name, lowered.

    Raises:
        LoweringError: A node of the wrapper has no place in a kernel graph.
    """
    return _Translator(gm, name, static, aligned, symbolic, turns or {}).run()


class _Translator:
    def __init__(
        self,
        gm: torch.fx.GraphModule,
        name: str,
        static: frozenset[int],
        aligned: frozenset[int],
        symbolic: bool,
        turns: Mapping[str, BoundTurns],
    ) -> None:
        self.gm, self.name, self.static, self.aligned, self.symbolic = gm, name, static, aligned, symbolic
        self.turns = turns
        self.numbers: dict[int, Any] = {}
        self.inputs: list[str | None] = []
        self.static_names: set[str] = set()
        self.memory = MemoryTable()
        self.constants: dict[str, torch.Tensor] = {}
        self.calls: list[KernelCall] = []
        self.kernels: list[Kernel] = []
        self.tuples: dict[str, int] = {}  # node that returns several tensors -> its kernel
        self.raising: set[int] = set()  # kernels that may raise for the values that they get
        self.joined: dict[str, list[int]] = {}  # concatenation -> the kernels that write its parts

    def run(self) -> Program:
        outputs: tuple[Any, ...] = ()
        for node in self.gm.graph.nodes:
            if self.symbolic:
                node.args, node.kwargs = tree_map_only(torch.fx.Node, plain_size, (node.args, node.kwargs))
            if node.op == "placeholder":
                self._add_input(node)
            elif node.op == "get_attr":
                self._add_constant(node)
            elif node.op == "output":
                result = node.args[0]
                result = result if isinstance(result, (list, tuple)) else [result]
                outputs = tuple(self._values(item) for item in result)
            elif node.target is torch.empty_strided:
                self.memory.allocate(node, *node.args[:2])
            elif node.target is torch.as_strided:
                self.memory.add_view(node)
            elif node.target is CONTROL:
                self._add_control(node)
            elif node.target is TURNS:
                self._add_turns(node)
            elif node.target is operator.getitem:
                self._add_element(node)
            else:
                self._add_kernel(node)
        return self._finish(outputs)

    def _add_input(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if isinstance(value, NUMBERS):
                self.numbers[len(self.inputs)] = value
            self.inputs.append(None)
            return
        if len(self.inputs) in self.static:
            self.static_names.add(node.name)
        self.inputs.append(node.name)
        self.memory.add(node.name, value)

    def _add_constant(self, node: torch.fx.Node) -> None:
        value = getattr(self.gm, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise LoweringError(
                f"Constant {node.target} is a {type(value).__name__}, not a tensor.", construct=str(node.target)
            )
        self.constants[node.name] = value
        if value.is_cuda and value.data_ptr() % ALIGNMENT_BYTES:  # Inductor takes every constant to be aligned
            with _disable_current_modes():
                self.constants[node.name] = realign(value)
        self.memory.add(node.name, value)

    def _leave_empty(self, names: Iterable[str]) -> None:
        """Let kernels of their own take the memory of allocations that nothing has written yet, and somebody reads.

        So it is where there are no elements, and where the user's own ``torch.empty`` was not filled, or not wholly.
        """
        for name in names:
            if name not in self.memory.layouts or name in self.memory.filled:
                continue
            layout = self.memory.layouts.pop(name)
            self.memory.filled.add(name)
            self.kernels.append(
                Kernel(
                    id=len(self.kernels),
                    name=str(EMPTY),
                    kind=KernelKind.LIBRARY,
                    device=self.memory.device[name],
                    reads=(),
                    writes=(name,),
                    allocates=(name,),
                )
            )
            options = {"dtype": layout.dtype, "device": layout.device}
            self.calls.append(KernelCall(EMPTY, (layout.size, layout.stride), options, results=((None, name),)))

    def _add_element(self, node: torch.fx.Node) -> None:
        source, index = node.args
        if source.name not in self.tuples:  # type: ignore[union-attr]
            raise LoweringError(
                f"{node.name} takes an element of {source}, which no kernel returned.", construct=node.name
            )
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        position = self.tuples[source.name]  # type: ignore[union-attr]
        kernel, call = self.kernels[position], self.calls[position]
        self.memory.bind(node, kernel)
        self.calls[position] = replace(call, results=(*call.results, (int(index), node.name)))  # type: ignore[call-overload]
        self._extend(position, node)

    def _extend(self, position: int, node: torch.fx.Node) -> None:
        """Let a kernel write and allocate the buffer bound to its result.

        An operator that returns a view of what it was given writes no memory. It makes something all the same, which is
        a buffer without bytes here: users of the view must come after.
        """
        kernel, made, num_bytes = self.kernels[position], node.name, self.memory.bytes[node.name]
        if node.name in self.memory.alias:
            made, num_bytes = view_of(node.name), 0
            self.memory.bytes[made], self.memory.device[made] = 0, self.memory.device[node.name]
        self.kernels[position] = replace(
            kernel,
            writes=(*kernel.writes, made),
            allocates=(*kernel.allocates, made),
            num_bytes=kernel.num_bytes + num_bytes,
        )

    def _add_kernel(self, node: torch.fx.Node) -> None:
        target = node.target
        if node.op != "call_function" or not callable(target) or getattr(target, "namespace", "") == "higher_order":
            raise LoweringError(
                f"The wrapper contains {node.format_node()}, which is not a kernel.", construct=str(target)
            )
        if not self.symbolic and isinstance(target, GeneratedKernel) and self._absorb(node):
            return
        if node.name in self.memory.layouts:
            return  # a concatenation whose parts have been written where they belong
        writer = None if self.symbolic else find_writer(node)
        join = None if writer is None else writer.join
        if writer is not None and join is None:
            self.memory.allocate(node, *layout_of(node.meta["val"]))
        reads, writes = self.memory.accesses(node, draws=draws_random_numbers(target, node.args, node.kwargs))
        self._leave_empty(reads)
        self.memory.filled.update(writes)
        parts: tuple[str, ...] = ()
        if writer is not None:
            if join is not None:
                self._add_part(node, join)
                parts = (join.name,)
            writes = (*writes, self.memory.base(node))
            self.memory.filled.add(self.memory.base(node))
        origins = node.meta.get("origins", ())
        value = node.meta.get("val")
        generated = isinstance(target, GeneratedKernel)
        name = target.__name__ if generated else str(target)
        if checks_indices(target.definition) if isinstance(target, GeneratedKernel) else may_raise(target):
            self.raising.add(len(self.kernels))
        self.kernels.append(
            Kernel(
                id=len(self.kernels),
                name=name if writer is None else writer.name,
                kind=KernelKind.FUSED if generated else kind_of(target) if writer is None else writer.kind,
                device=self.memory.device_of(node, reads + writes),
                reads=reads,
                writes=writes,
                num_bytes=self.memory.traffic(node, writes)
                + (storage_bytes(node.meta["val"]) if writer is not None else 0),
                flops=self._flops(node, origins),
                ops=(writer.ops if writer is not None else ()) or op_names(origins),
                parts=parts,
                **told_by(origins),
            )
        )
        if writer is not None:
            call = KernelCall(writer.function, self._values(writer.arguments), {"out": Value(node.name)})
        elif generated and target.tuner is not None:
            call = KernelCall(target.function, self._values(node.args), {}, stream_keyword="stream")
        else:
            callee = target.function if generated else node.meta.get("callee") or target
            call = KernelCall(callee, self._values(node.args), self._values(dict(node.kwargs)))
        self.calls.append(call)
        if isinstance(value, torch.Tensor) and "out" not in node.kwargs and not generated and writer is None:
            self.memory.bind(node, self.kernels[-1])
            self._extend(len(self.kernels) - 1, node)
            self.calls[-1] = replace(call, results=((None, node.name),))
        elif isinstance(value, (tuple, list)):
            self.tuples[node.name] = len(self.kernels) - 1

    def _add_control(self, node: torch.fx.Node) -> None:
        control = control_of(node.args)
        given: Any = node.args[0]
        for each, wanted in zip(given, control.given, strict=True):
            self._check_lies(each, wanted.stride, str(control.flow))
        reads, writes = self.memory.accesses(node, draws=control.draws)
        self._leave_empty(reads)
        origins = node.meta.get("origins", ())
        self.raising.add(len(self.kernels))
        self.tuples[node.name] = len(self.kernels)
        self.kernels.append(
            Kernel(
                id=len(self.kernels),
                name=str(control.flow),
                kind=KernelKind.CONTROL,
                device=self.memory.device_of(node, reads + writes),
                reads=reads,
                writes=writes,
                num_bytes=self.memory.traffic(node, writes) + control.num_bytes,
                flops=control.flops,
                ops=control.ops,
                **told_by(origins),
            )
        )
        self.calls.append(KernelCall(control, self._values(node.args[:1]), {}))

    def _add_turns(self, node: torch.fx.Node) -> None:
        arguments: Any = node.args
        given, bound = arguments[0], self.turns[arguments[1]]
        for position, wanted in bound.given.items():
            self._check_lies(given[position], wanted, LOOP)
        reads, writes = self.memory.accesses(node, draws=False)
        self._leave_empty(reads)
        if bound.may_raise:
            self.raising.add(len(self.kernels))
        self.tuples[node.name] = len(self.kernels)
        device = self.memory.device_of(node, reads + writes)
        self.kernels.append(Kernel(len(self.kernels), LOOP, KernelKind.CONTROL, device, reads, writes))
        self.calls.append(KernelCall(bound, self._values(node.args[:1]), {}))

    def _check_lies(self, node: torch.fx.Node, stride: tuple[int, ...], reader: str) -> None:
        """Raise unless a value has these strides, in which it is read."""
        value = node.meta["val"]
        lies = zip(value.shape, value.stride(), stride, strict=True)
        if any(size > 1 and one != other for size, one, other in lies):
            raise LoweringError(f"{node.name} does not lie as {reader} reads it.", construct=reader)

    def _flops(self, node: torch.fx.Node, origins: Any) -> Any:
        if isinstance(node.target, GeneratedKernel):
            return count_elementwise(set(origins))
        known = [arg.meta.get("val") for arg in node.all_input_nodes]
        with without_guards(known) if self.symbolic else nullcontext():
            return count_flops(node.target, node.args, node.kwargs, node.meta.get("val"))

    def _add_part(self, node: torch.fx.Node, join: torch.fx.Node) -> None:
        """Let a kernel write where a concatenation is to have its result."""
        if join.name not in self.memory.layouts:
            self.memory.allocate(join, *layout_of(join.meta["val"]))
        behind = 0
        for part in join.args[0]:  # type: ignore[union-attr]
            if part is node:
                break
            behind += part.meta["val"].shape[1]  # type: ignore[union-attr]
        size, stride = tuple(node.meta["val"].shape), join.meta["val"].stride()
        self.memory.views[node.name] = View(join.name, size, stride, behind * stride[1])
        self.joined.setdefault(join.name, []).append(len(self.kernels))

    def _absorb(self, node: torch.fx.Node) -> bool:
        """Let a library's kernel do what this one does to its result, if it can; return whether it does."""
        found = find_epilogue(node)
        if found is None:
            return False
        result, added, output = found.result, found.added, found.output
        position = next(i for i, kernel in enumerate(self.kernels) if result.name in kernel.writes)
        between = self.kernels[position + 1 :]
        if any(name in (*k.reads, *k.writes) for k in between for name in (result.name, output.name)):
            return False  # somebody wants the result as it was
        if any(self.memory.base(added) in k.writes for k in between):
            return False  # what is added is not there yet
        if output is not result and set(result.users) != {node}:
            return False
        kernel = self.kernels[position]
        self.calls[position] = KernelCall(
            found.function, self._values(found.arguments), {}, results=((None, output.name),)
        )
        self.kernels[position] = replace(
            kernel,
            name=f"{kernel.name}{found.name}",
            reads=(*kernel.reads, self.memory.base(added)),
            writes=(output.name,),
            allocates=(output.name,),
            ops=(*kernel.ops, *found.ops),
        )
        del self.memory.layouts[output.name]
        if output is not result:
            for table in (self.memory.layouts, self.memory.bytes, self.memory.device, self.memory.fake):
                table.pop(result.name, None)
        self.memory.filled.add(output.name)
        return True

    def _values(self, tree: Any) -> Any:
        return tree_map(lambda item: Value(item.name) if isinstance(item, torch.fx.Node) else item, tree)

    def _finish(self, outputs: tuple[Any, ...]) -> Program:
        returned = tuple(self.memory.base_name(leaf.name) for leaf in outputs if isinstance(leaf, Value))
        self._leave_empty(returned)
        order_checks(self.kernels, self.raising, {name for name in self.inputs if name is not None}, self.memory)
        owners = {self.memory.owner(name) for name in returned}
        buffers = tuple(
            Buffer(name, size, self.memory.device[name], self._role(name, owners), self.memory.alias.get(name))
            for name, size in self.memory.bytes.items()
        )
        inputs = tuple(name for name in self.inputs if name is not None)
        open_joined(self.name, self.kernels, self.joined, buffers)
        written = {self.memory.owner(name) for kernel in self.kernels for name in kernel.writes}
        graph = KernelGraph(
            name=self.name,
            kernels=tuple(self.kernels),
            buffers=buffers,
            inputs=(*inputs, *(name for name in self.memory.bytes if name.startswith(_PRETENDED))),
            outputs=returned,
        )
        return Program(
            graph=graph,
            calls=tuple(self.calls),
            inputs=tuple(self.inputs),
            outputs=outputs,
            views=self.memory.views,
            layouts=self.memory.layouts,
            constants=self.constants,
            mutated=frozenset(name for name in inputs if name in written),
            aligned=frozenset(name for i, name in enumerate(self.inputs) if name is not None and i in self.aligned),
            tensors={
                name: TensorLayout(*layout_of(value), value.dtype, numbered(value.device))
                for name, value in self.memory.fake.items()
            },
            numbers=self.numbers,
        )

    def _role(self, name: str, returned: set[str]) -> Role:
        if name in self.constants:
            return Role.CONSTANT
        if name.startswith(_PRETENDED) or name in self.static_names:
            return Role.STATE
        if name in self.inputs:
            return Role.INPUT
        return Role.OUTPUT if name in returned else Role.TEMPORARY
