"""The kernels that Inductor generates, Triton's and C++: their sources, how they are compiled, and how called.

What a kernel does with its arguments is told by the names that Inductor gives them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.wrapper import KernelDefinitionLine, PythonWrapperCodegen
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import parallel_num_threads

from millstream.lower.inductor.cpp_kernels import CppKernels
from millstream.lower.inductor.shortcuts.garbage import collect_meanwhile
from millstream.lower.inductor.tuning import keep_choice
from millstream.progress import count

SOURCES = "millstream_sources"
"""Where the graph of a wrapper has, among its ``meta``, the ``Sources`` of its kernels."""


@dataclasses.dataclass(frozen=True)
class KernelArgument:
    """The use that a generated kernel makes of one of its arguments."""

    name: str
    reads: bool
    writes: bool


class NativeKernel:
    """A C++ kernel, which can be called in two ways.

    Attributes:
        binding: Takes tensors and numbers and holds the GIL: Inductor's own binding, or our leaner one.
        entry: Address of a C++ function that takes an array of addresses and whole numbers, and neither needs the GIL
            nor takes it. ``None`` where there is none, and for kernels that divide integers: PyTorch 2.13 notes
            divisions by zero in one place for all of them.
        may_raise: Whether it checks indices.
    """

    def __init__(self, name: str, binding: Callable[..., None], body: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.may_raise = checks_indices(body)
        self.binding = binding
        home = getattr(binding, "__self__", None)
        self.entry: int | None = None if "integer_div_error" in body else getattr(home, "entry", None)

    def __call__(self, *args: Any) -> None:
        self.binding(*args)


class GeneratedKernel:
    """A Triton or C++ kernel: called with tensors and integers it runs on real tensors and does nothing on fake ones.

    Attributes:
        arguments: One entry per call argument, in order.
        tuner: The Triton tuner that launches it, or ``None`` for C++.
        definition: Its source, as Inductor writes it into a wrapper.
        function: What a launch calls: ``tuner.run`` or a ``NativeKernel``.
    """

    def __init__(self, name: str, compiled: Any, body: str, arguments: tuple[KernelArgument, ...]) -> None:
        self.__name__ = self.__qualname__ = name
        self.tuner = compiled if isinstance(compiled, CachingAutotuner) else None
        self.function: Callable[..., Any] = (
            compiled.run if self.tuner is not None else NativeKernel(name, compiled, body)
        )
        self.arguments = arguments
        self.definition = body

    def __call__(self, *args: Any) -> None:
        if any(isinstance(arg, torch._subclasses.FakeTensor) for arg in args):
            return
        if self.tuner is not None:
            self.function(*args, stream=torch.cuda.current_stream().cuda_stream)
        else:
            self.function(*args)


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of the kernels of a graph: all that another process needs to have them.

    Attributes:
        prologue: Of the Python module that defines the kernels which are imported.
        imported: Those kernels: name, definition, and what Inductor writes above it.
        files: Sources of C++ kernels, those together that share a file.
        cpp: Those kernels: name, the place of the file, and the place of the source in it.
    """

    prologue: str
    imported: tuple[tuple[str, str, str | None], ...]
    files: tuple[tuple[str, ...], ...] = ()
    cpp: tuple[tuple[str, int, int], ...] = ()

    def load(self) -> dict[str, tuple[Any, str]]:
        """Compile them, or take them out of Inductor's and Triton's caches.

        Returns:
            For each kernel name, the compiled object (a tuner or a C++ function) and its source.
        """
        for file in self.files:
            if any(source not in CppKernels.known for source in file):
                CppKernels.compile_file(file)
        kernels = _import_definitions(self.prologue, self.imported)
        for name, file, place in self.cpp:
            source = self.files[file][place]
            kernels[name] = CppKernels.known[source](), source
        return kernels


def import_kernels(
    prologue: str, lines: list[Any], cpp_kernels: CppKernels
) -> tuple[dict[str, tuple[Any, str]], Sources]:
    """Import all kernels that ``lines`` define; those not in ``cpp_kernels`` as one module, to compile in parallel.

    Returns:
        For each kernel name, the compiled object (a tuner or a C++ function) and its source; and all sources.
    """
    definitions = [line for line in lines if isinstance(line, KernelDefinitionLine)]
    bodies = {line.kernel_name: for_threads(line.kernel_body) for line in definitions}
    collected = cpp_kernels.collect()
    kernels: dict[str, tuple[Any, str]] = {name: (kernel, bodies[name]) for name, kernel in collected.items()}
    imported = tuple(
        (line.kernel_name, bodies[line.kernel_name], line.metadata)
        for line in definitions
        if line.kernel_name not in kernels
    )
    sources = {name: source for name, source in cpp_kernels.sources.items() if name in collected}
    files = tuple(dict.fromkeys(CppKernels.files[source] for source in sources.values()))
    place_of = {source: (number, place) for number, file in enumerate(files) for place, source in enumerate(file)}
    cpp = tuple((name, *place_of[source]) for name, source in sources.items())
    return {**kernels, **_import_definitions(prologue, imported)}, Sources(prologue, imported, files, cpp)


def _import_definitions(
    prologue: str, definitions: Sequence[tuple[str, str, str | None]]
) -> dict[str, tuple[Any, str]]:
    """Import kernels, given by name, definition and metadata, as one module, and wait until they are compiled."""
    if not definitions:
        return {}
    code = [
        PythonWrapperCodegen._format_kernel_definition(name, body, metadata=metadata)
        for name, body, metadata in definitions
    ]
    module = PyCodeCache.load("\n".join([prologue, *code]))
    kernels: dict[str, tuple[Any, str]] = {}
    if any(_is_compiling(getattr(module, name)) for name, _, _ in definitions):
        collect_meanwhile()
    for number, (name, body, _) in enumerate(definitions, 1):
        count("compiling", number, len(definitions), "kernels")
        compiled = getattr(module, name)
        while hasattr(compiled, "result"):  # still compiling
            compiled = compiled.result()
        if isinstance(compiled, CachingAutotuner):
            keep_choice(compiled, body)
        kernels[name] = (compiled, body)
    return kernels


def _is_compiling(kernel: Any) -> bool:
    """Return whether another process still compiles what stands for a kernel."""
    future = getattr(kernel, "future", None)
    return future is not None and not future.done()


def for_threads(body: str) -> str:
    """Let a C++ kernel run beside others, in a thread with fewer OpenMP threads than it was generated for.

    A loop shared among OpenMP threads is right for any number of them, so it takes no more than its thread has (matrix
    templates divide the work themselves, and keep their number). And a kernel that never divides integers need not
    enter itself in the one place of the process where PyTorch 2.13 notes divisions by zero.
    """
    # Without a number it was generated for as many as there are processors, and has room for no more.
    body = re.sub(
        r"(#pragma omp parallel)(?: num_threads\((\d+)\))?(?=\s*\{\s*int tid = omp_get_thread_num\(\);)",
        lambda found: f"{found[1]} num_threads(std::min({found[2] or parallel_num_threads()}, omp_get_max_threads()))",
        body,
    )
    if "_integral(" in body or "inductor_cpu_integer_div_error" not in body:
        return body
    return re.sub(r".*inductor_cpu_integer_div_error.*\n", "", body)


def raise_index_errors(body: str) -> str:
    """Let a C++ kernel throw what becomes an ``IndexError``, as in eager mode, where an index is out of range."""
    return re.sub(
        r"\b(?:AOTI_)?TORCH_CHECK\((?P<test>.*), \"index out of bounds(?:[^\"]*< (?P<size>\d+)L|[^\"]*)\"\);",
        lambda found: (
            f"if (C10_UNLIKELY(!({found['test']}))) "
            f'throw std::out_of_range("index out of range{_of_size(found["size"])}");'
        ),
        body,
    )


def checks_indices(body: str) -> bool:
    """Return whether a C++ kernel may throw."""
    return "throw std::out_of_range(" in body or "TORCH_CHECK(" in body


def _of_size(size: str | None) -> str:
    return f": a dimension has {size} elements" if size else ""


def _declare_arguments(body: str) -> list[str]:
    """Return how a C++ kernel declares its arguments: ``const float* in_ptr0``."""
    match = re.search(r"\bvoid\s+kernel\s*\(([^)]*)\)", body)
    return [part.strip() for part in match.group(1).split(",") if part.strip()] if match else []


def describe_arguments(compiled: Any, body: str, num_args: int) -> tuple[KernelArgument, ...]:
    """Tell which arguments a generated kernel reads and writes, from the names that Inductor gives them.

    A name that follows no convention counts as both read and written: a missed dependency would be a race, a false one
    costs time.
    """
    if isinstance(compiled, CachingAutotuner):
        signature = compiled.triton_meta["signature"]
        names = [name for name in signature if name not in compiled.triton_meta.get("constants", {})]
        if len(names) < num_args:
            names = list(signature)
        mutated = {name for name in compiled.mutated_arg_names or () if is_updated(name, body)}
    else:
        names = [declaration.split()[-1].lstrip("*") for declaration in _declare_arguments(body)]
        mutated = set()
    names += [f"unknown{i}" for i in range(len(names), num_args)]
    return tuple(_describe_argument(name, name in mutated) for name in names[:num_args])


def is_updated(name: str, body: str) -> bool:
    """Return whether a Triton kernel's argument that is listed as mutated holds something that the kernel needs.

    Inductor lists every input of the graph that a kernel writes. Most are overwritten without being looked at.
    """
    return not name.startswith("out_ptr") or name in _loaded(body)


@functools.lru_cache(maxsize=1)  # asked for every argument of one kernel, of which an optimizer's has hundreds
def _loaded(body: str) -> frozenset[str]:
    """Names of what a Triton kernel loads from, or adds to."""
    return frozenset(re.findall(r"\b(?:load|atomic_\w+)\(\s*(\w+)", body))


def _describe_argument(name: str, mutated: bool) -> KernelArgument:
    """Tell how a generated kernel uses the argument of this name."""
    if name.startswith("in_ptr") or re.fullmatch(r"ks\d+|[a-z]\d?numel|seed_offset|load_seed_offset\d*", name):
        return KernelArgument(name, reads=True, writes=mutated)
    if name.startswith("out_ptr"):
        return KernelArgument(name, reads=mutated, writes=True)
    if re.fullmatch(r"arg_[A-Za-z]+|bias_ptr", name):  # inputs of matrix-product templates
        return KernelArgument(name, reads=True, writes=mutated)
    return KernelArgument(name, reads=True, writes=True)
