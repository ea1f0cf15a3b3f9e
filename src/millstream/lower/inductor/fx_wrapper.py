"""TorchInductor's FX wrapper, taught what a scheduler needs. All private Inductor APIs of the wrapper live here.

Inductor ends by writing a *wrapper*: a program that allocates buffers and launches kernels. Its FX wrapper writes that
program as an FX graph. The subclasses here change three things: C++ kernels are accepted (upstream takes Triton kernels
only), a Triton launch keeps the kernel's own tuner (upstream drops warps and stages), and every launch remembers the
aten nodes it came from.

Tried on torch 2.11 (CUDA, CPU) and 2.13 (CPU).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config, graph, ir
from torch._inductor.codegen import common, wrapper_fxir
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.utils import convert_to_symint
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException, in_kernel_invocation_manager
from torch.utils._pytree import tree_map_only

from millstream._torch.compiler.symbols import with_numbers
from millstream.errors import LoweringError
from millstream.lower.inductor.cpp_kernels import CppKernels
from millstream.lower.inductor.generated_kernels import (
    SOURCES,
    GeneratedKernel,
    describe_arguments,
    for_threads,
    import_kernels,
    raise_index_errors,
)
from millstream.lower.operators import draws_random_numbers, written_arguments

#: Inductor options under which the FX wrapper yields plain allocations, views and launches. Memory is ours to plan, so
#: Inductor must not hand a dead buffer on; but only Inductor knows which kernels may write over an input that dies with
#: them, and that it does. The converter of 2.11 rejects assertion lines, so engines compare what operators return
#: themselves (``engine.promises``). Where kernels start early (programmatic dependent launch), Inductor places their
#: waits for its own order of kernels on one stream: wrong for plans on several. A kernel that reduces rows and columns
#: at once has a line of Python after it, which the converter rejects.
OPTIONS: dict[str, Any] = {
    "triton.mix_order_reduction": False,
    "fx_wrapper": True,
    "cpp_wrapper": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": True,
    "memory_planning": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "graph_partition": False,
    "triton.enable_pdl": False,
}


class DeviceCopyLine(WrapperLine):
    """``destination.copy_(source)`` as a wrapper line; upstream writes it as text, which has no FX form."""

    def __init__(self, source: ir.IRNode, destination: ir.IRNode, non_blocking: bool) -> None:
        self.source, self.destination, self.non_blocking = source, destination, non_blocking

    def codegen_fx(self, converter: Any) -> Callable[[WrapperLine], None]:
        return converter._generate_device_copy  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class NumberBuffer:
    """An input of the graph that is an expression of sizes."""

    expression: sympy.Expr

    def get_name(self) -> str:
        return f"number_{re.sub(r'[^0-9A-Za-z]+', '_', str(self.expression))}"

    def get_example(self) -> Any:
        return convert_to_symint(self.expression)


class Converter(wrapper_fxir.FxConverter):
    """Wrapper lines → FX, for Triton and C++ kernels alike."""

    generated: dict[str, tuple[Any, str]]

    def generate(self) -> torch.fx.GraphModule:
        upstream = wrapper_fxir._node_metadata_hook
        wrapper_fxir._node_metadata_hook = note_value  # pyrefly: ignore[bad-assignment]
        try:
            gm = super().generate()
        finally:
            wrapper_fxir._node_metadata_hook = upstream
        write_sizes_as_numbers(next(iter(reversed(gm.graph.nodes))))
        return gm

    def _generate_graph_inputs(self) -> None:
        """Take a number that is given twice once, as a backward pass is given sizes that were found to be equal."""
        met: set[Any] = set()
        for name, node in self.graph_inputs.items():
            if isinstance(node, sympy.Expr) and not node.is_number:
                self.graph_inputs[name] = None if node in met else node  # type: ignore[assignment]
                met.add(node)
        super()._generate_graph_inputs()

    def _get_buffer(self, node: Any) -> Any:
        """Take an input that is a product of sizes, as forward passes save them: upstream takes bare symbols only."""
        if isinstance(node, sympy.Expr) and not isinstance(node, sympy.Symbol):
            return NumberBuffer(node)
        return super()._get_buffer(node)  # type: ignore[arg-type]

    def _generate_graph_input_shapes(self) -> None:
        """Nothing: upstream makes nodes that compute sizes, and here sizes are symbolic numbers among the arguments."""

    def _generate_symbolic_call_arg(self, line: Any) -> None:
        """Likewise."""

    def _generate_sym_node(self, s: Any) -> Any:
        return int(s) if isinstance(s, sympy.Integer) else s

    def _generate_buffer(self, node: Any) -> Any:
        return node.expr if isinstance(node, ir.ShapeAsConstantBuffer) else super()._generate_buffer(node)

    def _lookup_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Find sizes too, where Inductor has written a symbol's name: also of one that stands for an expression."""
        if all(arg in self.buffer_to_node for arg in args if isinstance(arg, str)):
            return super()._lookup_args(args)
        sizes = V.graph.sizevars
        symbols = {str(each): each for each in (*sizes.shape_env.var_to_range, *sizes.inv_precomputed_replacements)}
        found = (arg if arg in self.buffer_to_node else symbols.get(arg, arg) for arg in args)
        return super()._lookup_args(tuple(found))

    def _generate_graph_constants(self) -> None:
        for name, value in V.graph.constants.items():
            self.gm.register_buffer(
                name, value
            )  # upstream makes the node first, which warns that nothing stands after it
            node = self.gm.graph.get_attr(name)
            node.meta["val"] = value
            self.buffer_to_node[name] = node

    def _generate_allocate(self, line: Any) -> None:
        """Name the device by its number, which upstream leaves out: memory would lie wherever is current.

        Tried on 2.11 and 2.13.
        """
        super()._generate_allocate(line)
        node = self.buffer_to_node[line.node.get_name()]
        node.kwargs = {**node.kwargs, "device": line.node.get_device()}
        note_value(node, V.fake_mode)

    def _generate_kernel_definition(self, line: Any) -> None:
        pass  # all kernels were imported together, so that they compile in parallel

    def _generate_kernel_call(self, line: Any) -> None:
        known = (torch.fx.Node, sympy.Basic)
        args: Any = tuple(a if isinstance(a, known) else plain_number(a) for a in self._lookup_args(line.call_args))
        entry = self.generated.get(line.kernel_name)
        if entry is None:
            raise LoweringError(f"Kernel {line.kernel_name} is called but not defined.", construct=line.kernel_name)
        compiled, body = entry
        kernel = GeneratedKernel(line.kernel_name, compiled, body, describe_arguments(compiled, body, len(args)))
        node = self.gm.graph.call_function(kernel, args=args)
        node.meta["origins"] = getattr(line, "origins", ())

    def _generate_extern_kernel_common(self, kernel: Any, out_ir_node: Any) -> None:
        if kernel.op_overload is None:
            raise LoweringError(
                f"Library kernel {kernel.python_kernel_name} has no aten operator.",
                construct=str(kernel.python_kernel_name),
            )
        last = next(iter(reversed(self.gm.graph.nodes)), None)
        super()._generate_extern_kernel_common(kernel, out_ir_node)
        self._tag_origins(kernel, last)

    def _generate_fallback_call(self, ir_node: Any, args: Any = None, kwargs: Any = None) -> None:
        last = next(iter(reversed(self.gm.graph.nodes)), None)
        super()._generate_fallback_call(ir_node, args, kwargs)
        self._tag_origins(ir_node, last)

    def _generate_unbacked_symbol_defs(self, line: Any) -> None:
        if line.unbacked_bindings:  # upstream looks for the result first, which an operator that only checks has not
            super()._generate_unbacked_symbol_defs(line)

    def _generate_device_copy(self, line: Any) -> None:
        source, destination = self._generate_buffer(line.source), self._generate_buffer(line.destination)
        self.gm.graph.call_function(torch.ops.aten.copy_.default, (destination, source, line.non_blocking))

    def _tag_origins(self, kernel: Any, last: torch.fx.Node | None) -> None:
        """Give the nodes made since ``last`` the aten nodes that ``kernel`` came from."""
        for node in reversed(self.gm.graph.nodes):
            if node is last:
                break
            node.meta["origins"] = tuple(kernel.get_origins())
            if node.target is kernel.op_overload:
                node.meta["callee"] = quick_callee(kernel)
                if node.meta["val"] is None and isinstance(kernel.layout, ir.Layout):
                    node.meta["val"] = kernel.layout.get_example()


class KernelGraphModule(common.FileBackedGraphModule):
    """A finished graph as Inductor takes it, without the file that upstream writes of each.

    Upstream's file is deleted only where the interpreter exits normally: processes that are killed or forked leave it
    in the temporary folder, and one that compiles for days collects them. It is written where Inductor was asked for
    its output code (``TORCH_LOGS=output_code``, ``TORCH_COMPILE_DEBUG=1``), since that is what names or copies it.

    Tried on 2.11 and 2.13.
    """

    def __post_init__(self) -> None:
        if config.trace.enabled or graph.output_code_log.isEnabledFor(logging.INFO):
            super().__post_init__()

    @property
    def __file__(self) -> str:
        written = getattr(self, "tempfile", None)
        return "<kernel graph>" if written is None else written.name


class Codegen(wrapper_fxir.WrapperFxCodegen):
    """The FX wrapper with our converter; ``collect_wrappers`` makes a subclass of it for each compilation.

    Attributes:
        collected: Where finished graphs go.
        cpp_kernels: Compiles C++ kernels while others are still being written.
    """

    collected: ClassVar[list[torch.fx.GraphModule]]
    cpp_kernels: ClassVar[CppKernels]

    def writeline(self, line: Any) -> None:
        """Note a line, unless it is a comment, as of ``TORCH_COMPILE_DEBUG=1``: upstream's converter refuses text."""
        if not (isinstance(line, str) and all(part.lstrip()[:1] in ("", "#") for part in line.splitlines())):
            super().writeline(line)

    def generate_kernel_call(self, kernel_name: str, call_args: Any, **kwargs: Any) -> None:
        super().generate_kernel_call(kernel_name, call_args, **kwargs)
        node = V.graph.scheduler.current_node
        if node is not None:
            parts = (part.node for part in node.get_nodes() if part.node is not None)
            # Each once: of a kernel that updates all parameters, every part has the origins of all.
            origins = dict.fromkeys(origin for part in parts for origin in part.get_origins())
            self.lines[-1].origins = tuple(origins)  # type: ignore[union-attr]

    def define_kernel(self, kernel_name: str, kernel_body: str, *args: Any, gpu: bool = True, **kwargs: Any) -> None:
        if not gpu:
            self.cpp_kernels.add(kernel_name, raise_index_errors(for_threads(kernel_body)))
        super().define_kernel(kernel_name, kernel_body, *args, gpu=gpu, **kwargs)

    def codegen_device_copy(self, src: Any, dst: Any, non_blocking: Any) -> None:  # noqa: ARG002
        """Note a copy by the operands of ``DeviceCopy`` or ``InplaceCopyFallback``; of views, the arguments are text.

        Tried on 2.11 and 2.13.
        """
        operation: Any = V.graph.scheduler.current_node.node  # pyrefly: ignore[missing-attribute]
        target = operation.inputs[0] if len(operation.inputs) > 1 else getattr(operation, "output_view", None)
        self.writeline(DeviceCopyLine(operation.inputs[-1], target or operation, bool(non_blocking)))

    def _generate(self, is_inference: bool) -> tuple[common.FileBackedGraphModule, None]:
        if self.is_subgraph:
            raise LoweringError(
                "Control flow inside a graph (cond, while_loop) has no kernel graph.", construct="subgraph"
            )
        self.run_wrapper_ir_passes(is_inference)
        converter = Converter(
            lines=self.lines,
            prologue="\n".join([self.imports.getvalue(), self.header.getvalue()]),
            graph_inputs=self.get_fx_graph_inputs(),
            graph_outputs=self.get_graph_outputs(),
            subgms=self.subgms,
            is_subgraph=self.is_subgraph,
        )
        graph: Any = V.graph.module.graph
        for node in graph.nodes:  # of one operator this is tried on the GPU, while kernels compile
            if isinstance(node.target, torch._ops.OpOverload):
                draws_random_numbers(node.target, node.args, node.kwargs)
        converter.generated, sources = import_kernels(converter.prologue, self.lines, self.cpp_kernels)
        gm = converter.generate()
        gm.meta[SOURCES] = sources
        self.collected.append(gm)
        return KernelGraphModule(gm, gm.forward), None


@contextlib.contextmanager
def collect_wrappers(options: dict[str, Any]) -> Iterator[list[torch.fx.GraphModule]]:
    """Let Inductor use our FX wrapper inside the ``with`` block, and collect the graphs that it yields.

    Not reentrant and not for several threads at once: Inductor itself compiles under one lock.
    """
    common.init_backend_registration()
    saved = dict(common.device_codegens)

    class Wrapper(Codegen):
        collected: ClassVar[list[torch.fx.GraphModule]] = []
        cpp_kernels: ClassVar[CppKernels] = CppKernels()

    try:
        for device in ("cpu", "cuda"):
            entry = saved.get(device)
            if entry is not None:
                common.register_backend_for_device(
                    device, entry.scheduling, entry.wrapper_codegen, entry.cpp_wrapper_codegen, Wrapper
                )
        with config.patch({**options, **OPTIONS}):
            yield Wrapper.collected
    finally:
        common.device_codegens.update(saved)


def _allocated(fake_mode: Any, size: Any, stride: Any, *, dtype: Any, device: Any) -> Any:
    """A fake tensor as ``torch.empty_strided`` gives it, of which a large graph has a thousand."""
    if all(type(number) is int for number in (*size, *stride)):
        with in_kernel_invocation_manager(fake_mode):
            empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(fake_mode, empty, torch.device(device))
    with fake_mode, enable_python_dispatcher():
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def note_value(node: torch.fx.Node, fake_mode: Any = None) -> None:
    """Run a new node on fake tensors and keep the result as ``node.meta["val"]``.

    Upstream's hook fails for operators without a fake implementation (oneDNN's in-place ones); here such an operator
    returns what it writes, and otherwise nothing is known of its result. One that is told where to write is not run.
    """
    node.meta["val"] = None
    write_sizes_as_numbers(node)
    if isinstance(node.target, GeneratedKernel):
        return
    out = node.kwargs.get("out")
    if isinstance(out, torch.fx.Node):  # what it returns; PyTorch 2.11 makes numbers of symbolic sizes where it is run
        node.meta["val"] = out.meta["val"]
        return
    if node.target is torch.empty_strided and fake_mode is not None:
        node.meta["val"] = _allocated(fake_mode, *node.args, **node.kwargs)
        return
    args, kwargs = tree_map_only(torch.fx.Node, lambda arg: arg.meta["val"], (node.args, node.kwargs))
    try:
        with fake_mode or contextlib.nullcontext(), enable_python_dispatcher():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    except UnsupportedOperatorException:
        written = written_arguments(node.target, node.args, node.kwargs)
        node.meta["val"] = written[0].meta["val"] if written else None


def write_sizes_as_numbers(node: torch.fx.Node) -> None:
    """Write symbolic numbers for expressions among the arguments of a node: FX warns of them while it makes one."""
    node.args, node.kwargs = (with_numbers(part, plain_number) for part in (node.args, node.kwargs))


def quick_callee(kernel: Any) -> Callable[..., Any] | None:
    """Return what Inductor's own wrapper calls for a library kernel.

    Torch's C binding, 2–5 µs quicker than the operator.
    """
    prefix, _, name = str(kernel.python_kernel_name).rpartition("extern_kernels.")
    return getattr(wrapper_fxir.extern_kernels, name, None) if not prefix and name else None


def plain_number(value: Any) -> Any:
    """Turn a sympy number into a Python one, and one with symbols in it into a symbolic one."""
    if isinstance(value, (int, float, bool, str, type(None), torch.dtype, torch.device)):
        return value
    if getattr(value, "is_Integer", False):
        return int(value)
    if getattr(value, "is_Float", False) or getattr(value, "is_Rational", False):
        return float(value)
    if isinstance(value, ir.IRNode):
        raise LoweringError(f"Kernel argument {value} is not a buffer.", construct=str(value))
    if isinstance(value, sympy.Expr):  # Triton kernels take some as numbers that were computed before
        value = V.graph.sizevars.remove_precomputed_replacements(value)
        if getattr(value, "is_integer", False):
            return convert_to_symint(value)
        if getattr(value, "is_real", False):
            return V.graph.sizevars.shape_env.create_symfloatnode(value, hint=None)
    raise LoweringError(f"Kernel argument {value} depends on a shape that is not known.", construct=str(value))
