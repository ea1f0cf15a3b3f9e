"""A program as plain data for JSON, and back.

Every value is written with its type: ``["tuple", ...]``, ``["Layout", {...}]``. What a kernel calls is written as the
name by which another process finds it: an operator with its schema, a library function of Inductor's, a function of
this package, or a generated kernel, whose source is kept beside. Nothing that is read is evaluated here.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
from collections.abc import Callable, Container, Iterable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from millstream._torch.compiler.size_expressions import decode_expression, encode_expression, kind_of_number, number_of
from millstream._torch.compiler.symbols import NUMBERS, definition_of, expression_of
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.lower.kept.key import ProgramNotKept, bytes_of
from millstream.lower.translation.memory_table import storage_bytes
from millstream.program import KernelCall, Program, TensorLayout, Value, View

_CLASSES: dict[str, type] = {
    each.__name__: each for each in (Buffer, KernelCall, Kernel, KernelGraph, TensorLayout, Program, Value, View)
}
_ENUMS: dict[str, type[StrEnum]] = {each.__name__: each for each in (KernelKind, Role)}
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
MOST_DATA_BYTES = 1 << 20
"""Of a constant that is written down; a larger one is found again in the graph, or the program is not kept."""

Kernels = Mapping[str, Callable[..., Any]]  # what a generated kernel's launch calls, by the kernel's name


class Encoder:
    """Writes values as plain data.

    Args:
        kernels: What launches of generated kernels call, and the kernel's name.
        attributes: Tensors of the graph that was lowered, by name.
        symbols: Names of the symbols that sizes may be made of.

    Attributes:
        used: Those of the attributes that were written.
    """

    def __init__(
        self,
        kernels: Iterable[tuple[Callable[..., Any], str]],
        attributes: Mapping[str, torch.Tensor],
        symbols: Container[str] = (),
    ) -> None:
        self._symbols = symbols
        self._kernels = {id(function): name for function, name in kernels}
        self._attributes = {id(tensor): name for name, tensor in attributes.items()}
        self.used: set[str] = set()

    def encode(self, value: Any) -> Any:
        """Write a value.

        Raises:
            NotKept: It cannot be found again in another process.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return ["float", value.hex()]
        if isinstance(value, NUMBERS):
            return self._number(value)
        kind = type(value).__name__
        if isinstance(value, (tuple, list)):  # FX has lists of its own
            return ["tuple" if isinstance(value, tuple) else "list", *map(self.encode, value)]
        if isinstance(value, dict):
            return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if type(value) is frozenset:
            return ["frozenset", *sorted(value)]
        if kind in _ENUMS and type(value) is _ENUMS[kind]:
            return [kind, value.value]
        if kind in _CLASSES and type(value) is _CLASSES[kind]:
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return [kind, {name: self.encode(item) for name, item in fields.items()}]
        if type(value) in _NAMED.values():
            return [kind, str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, torch.Tensor):
            return self._constant(value)
        return self._function(value)

    def _number(self, value: Any) -> Any:
        expression = expression_of(value)
        if not all(str(symbol) in self._symbols for symbol in expression.free_symbols):
            raise ProgramNotKept(f"size {expression} follows from no input")
        try:
            return ["number", kind_of_number(value), encode_expression(expression)]
        except (LookupError, ValueError) as error:
            raise ProgramNotKept(str(error)) from error

    def _constant(self, value: torch.Tensor) -> Any:
        size = value.numel() * value.element_size()
        is_whole = not isinstance(value, torch.nn.Parameter) and storage_bytes(value) == size
        if is_whole and size <= MOST_DATA_BYTES:
            data = base64.b64encode(bytes_of(value)).decode()
            return ["tensor", data, *map(self.encode, (value.dtype, tuple(value.shape), value.stride(), value.device))]
        if id(value) in self._attributes:
            self.used.add(self._attributes[id(value)])
            return ["attribute", self._attributes[id(value)]]
        raise ProgramNotKept(f"a constant of {size} bytes is none of the graph's own")

    def _function(self, function: Any) -> Any:
        if id(function) in self._kernels:
            return ["kernel", self._kernels[id(function)]]
        if isinstance(function, torch._ops.OpOverload):
            return ["operator", function._schema.name, function._overloadname, str(function._schema)]
        for name, known in vars(_library()).items():
            if known is function:
                return ["library", name]
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        if str(module).startswith("millstream.") and _find_function(module, name) is function:
            return ["function", module, name]
        raise ProgramNotKept(f"{getattr(function, '__name__', function)!r} cannot be named")


class Decoder:
    """Reads what an ``Encoder`` has written.

    Args:
        kernels: The generated kernels by name.
        attributes: Tensors of the graph by name.
        symbols: Symbolic numbers that are symbols, by name.
    """

    def __init__(
        self, kernels: Kernels, attributes: Mapping[str, torch.Tensor], symbols: Mapping[str, Any] | None = None
    ) -> None:
        self._kernels, self._attributes, self._numbers = kernels, attributes, symbols or {}
        self._symbols = {name: definition_of(number) for name, number in self._numbers.items()}

    def decode(self, data: Any) -> Any:
        """Read a value.

        Raises:
            LookupError: It names what there is not.
            ValueError: It is not as an ``Encoder`` writes it; ``TypeError`` likewise.
        """
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in _CLASSES:
            return _CLASSES[kind](**{name: self.decode(item) for name, item in rest[0].items()})
        if kind in _ENUMS:
            return _ENUMS[kind](rest[0])
        if kind in _NAMED:
            found = getattr(torch, rest[0])
            if not isinstance(found, _NAMED[kind]):
                raise ValueError(f"{rest[0]} is no {kind}")
            return found
        return getattr(self, f"_read_{kind}")(*rest)

    def _read_tuple(self, *items: Any) -> Any:
        return tuple(map(self.decode, items))

    def _read_list(self, *items: Any) -> Any:
        return list(map(self.decode, items))

    def _read_dict(self, *items: Any) -> Any:
        return {self.decode(key): self.decode(item) for key, item in items}

    def _read_frozenset(self, *items: Any) -> Any:
        return frozenset(items)

    def _read_float(self, text: str) -> Any:
        return float.fromhex(text)

    def _read_number(self, kind: str, expression: Any) -> Any:
        return number_of(kind, decode_expression(expression, self._symbols), self._numbers)

    def _read_device(self, text: str) -> Any:
        return torch.device(text)

    def _read_attribute(self, name: str) -> Any:
        return self._attributes[name]

    def _read_tensor(self, data: str, *layout: Any) -> Any:
        dtype, shape, stride, device = map(self.decode, layout)
        with _disable_current_modes(), torch.no_grad():
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if data:
                made.copy_(torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape))
            return made

    def _read_kernel(self, name: str) -> Any:
        return self._kernels[name]

    def _read_operator(self, name: str, overload: str, schema: str) -> Any:
        space, _, packet = name.partition("::")
        found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        if str(found._schema) != schema:
            raise LookupError(f"{name} has another schema")
        return found

    def _read_library(self, name: str) -> Any:
        return vars(_library())[name]

    def _read_function(self, module: str, name: str) -> Any:
        found = _find_function(module, name) if module.startswith("millstream.") else None
        if found is None:
            raise LookupError(f"there is no {module}.{name}")
        return found


def _library() -> Any:
    """Return where Inductor keeps the C functions that its wrapper calls for library kernels."""
    from torch._inductor.codegen.wrapper_fxir import extern_kernels

    return extern_kernels


def _find_function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
