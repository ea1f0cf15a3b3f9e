"""C++ kernels, compiled several to a file while Inductor still writes the next ones.

Inductor compiles each kernel by itself, after all are written. Most of the half second that a file takes is the same
for every file: starting the compiler, loading its headers, linking. So kernels share files; and they get leaner Python
bindings, which cost a quarter of a microsecond a call instead of one and a half.

Private APIs of Inductor's code cache; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

from millstream.progress import count

BATCH = 6
"""Kernels in a file: more save compiler starts, fewer keep more cores busy."""

_SIMPLE = re.compile(r'\s*(#include [^\n]*\s+)*extern "C"\s+void\s+(?P<name>kernel)\(')

_BINDINGS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <exception>
#include <stdexcept>
#include <type_traits>
#include <utility>

static void* (*tensor_data)(PyObject*);

template <class T> static inline T parse(PyObject* argument) {{
    if constexpr (std::is_pointer_v<T>) {{
        return static_cast<T>(tensor_data(argument));
    }} else {{
        T value;
        if constexpr (std::is_floating_point_v<T>) value = static_cast<T>(PyFloat_AsDouble(argument));
        else value = static_cast<T>(PyLong_AsLongLong(argument));
        if (value == static_cast<T>(-1) && PyErr_Occurred()) throw std::invalid_argument("expected a number");
        return value;
    }}
}}

template <class... T, std::size_t... I>
static PyObject* call(void (*kernel)(T...), PyObject* const* arguments, Py_ssize_t count, std::index_sequence<I...>) {{
    if (count != sizeof...(T)) return PyErr_Format(PyExc_TypeError, "expected %zu arguments", sizeof...(T));
    try {{
        kernel(parse<T>(arguments[I])...);
    }} catch (const std::out_of_range& error) {{
        PyErr_SetString(PyExc_IndexError, error.what());
        return nullptr;
    }} catch (const std::exception& error) {{
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }}
    Py_RETURN_NONE;
}}

template <class... T>
static PyObject* call(void (*kernel)(T...), PyObject* const* arguments, Py_ssize_t count) {{
    return call(kernel, arguments, count, std::index_sequence_for<T...>{{}});
}}

template <class... T, std::size_t... I>
static void run(void (*kernel)(T...), const int64_t* arguments, std::index_sequence<I...>) {{
    kernel((T)arguments[I]...);
}}

template <class... T>
static void run(void (*kernel)(T...), const int64_t* arguments) {{
    run(kernel, arguments, std::index_sequence_for<T...>{{}});
}}

{functions}
static PyMethodDef methods[] = {{
{methods}
}};

extern "C" PyObject* millstream_kernel(Py_ssize_t number, void* function, PyObject* self) {{
    tensor_data = reinterpret_cast<void* (*)(PyObject*)>(function);
    return PyCFunction_New(methods + number, self);
}}
"""

_FUNCTION = """static PyObject* {name}_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {{
    return call({name}, arguments, count);
}}
extern "C" void {name}_entry(const int64_t* arguments) {{
    run({name}, arguments);
}}
"""

_METHOD = (
    '    {{"{name}", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>({name}_call)), METH_FASTCALL, nullptr}},'
)

_GUARDS: Any = torch._C._dynamo.guards
_TENSOR_DATA: int = _GUARDS._torchinductor_pyobject_tensor_data_ptr  # address of a C function: tensor to its memory

Kernel = Callable[..., None]


class _Libraries(CppPythonBindingsCodeCache):
    """Compiles with the flags and headers of Inductor's own kernels; loads without importing."""

    cache: ClassVar[dict[str, Any]] = {}  # pyrefly: ignore[bad-override]

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:  # noqa: ARG003  upstream's signature
        library = ctypes.PyDLL(path)
        library.millstream_kernel.argtypes = [ctypes.c_ssize_t, ctypes.c_void_p, ctypes.py_object]
        library.millstream_kernel.restype = ctypes.py_object
        return library


class CppKernels:
    """The C++ kernels of one graph, on their way from source to something to call."""

    known: ClassVar[dict[str, Callable[[], Kernel]]] = {}  # by source, over all graphs of the process
    files: ClassVar[dict[str, tuple[str, ...]]] = {}  # likewise: all sources that share a file

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        self._waiting: list[str] = []

    def add(self, name: str, definition: str) -> None:
        """Take a kernel over, unless it is of a kind that cannot share a file.

        Args:
            name: Of the kernel, and unique in the graph.
            definition: The call that Inductor writes: ``async_compile.cpp_pybinding([...], '''source''')``.
        """
        source = eval(definition, {"async_compile": _SourceTaker})  # noqa: S307  upstream runs it as well
        match = _SIMPLE.match(source)
        if match is None or 'extern "C"' in source[match.end() :]:
            return
        self._sources[name] = source
        if source not in self.known and source not in self._waiting:
            self._waiting.append(source)
            if len(self._waiting) == BATCH:
                self._compile()

    def collect(self) -> dict[str, Kernel]:
        """All kernels that were taken over, by name; none if a file does not compile: one by one it shows which."""
        self._compile()
        try:
            kernels: dict[str, Kernel] = {}
            for number, (name, source) in enumerate(self._sources.items(), 1):
                count("compiling", number, len(self._sources), "kernels")
                kernels[name] = self.known[source]()
            return kernels
        except CppCompileError:
            for source in self._sources.values():
                self.known.pop(source, None)
            return {}

    @property
    def sources(self) -> dict[str, str]:
        """The sources of all kernels that were taken over, by name."""
        return dict(self._sources)

    def _compile(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            self.compile_file(tuple(batch))

    @classmethod
    def compile_file(cls, batch: tuple[str, ...]) -> None:
        """Begin to compile a file of several sources, or to load it where that was done before."""
        names = [f"kernel{number}" for number in range(len(batch))]
        parts = []
        for name, source in zip(names, batch, strict=True):
            match = _SIMPLE.match(source)
            assert match is not None
            parts.append(source[: match.start("name")] + name + source[match.end("name") :])
        functions = "".join(_FUNCTION.format(name=name) for name in names)
        methods = "\n".join(_METHOD.format(name=name) for name in names)
        parts.append(_BINDINGS.format(functions=functions, methods=methods))
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        load = _Libraries.load_async("\n".join(parts), "cpu", submit_fn=submit)
        for number, source in enumerate(batch):
            cls.known[source] = functools.cache(functools.partial(_bind, load, number))
            cls.files[source] = batch


def _bind(load: Callable[[], Any], number: int) -> Kernel:
    """Wait for a file, and take one of its kernels, which knows where it is from."""
    library = load()
    entry = ctypes.cast(getattr(library, f"kernel{number}_entry"), ctypes.c_void_p).value
    home = SimpleNamespace(entry=entry)
    return library.millstream_kernel(number, _TENSOR_DATA, home)  # type: ignore[no-any-return]


class _SourceTaker:
    @staticmethod
    def cpp_pybinding(_: list[str], source: str) -> str:
        return source
