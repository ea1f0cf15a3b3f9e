"""What of an object can be no other as long as it is the same one: between processes it can, and is compared."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream._torch.dispatcher import is_known
from millstream.capture.record.fleeting import is_written_in_python
from millstream.capture.record.reads import WHOLE, behind, is_a

MOST_BYTES = 1 << 20
"""Of an array that is compared by its content."""


class TraceNotKept(Exception):  # noqa: N818  no error: the step is traced in every process
    """A trace that is not kept on disk, or cannot be taken from there; the message says why."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), torch.dtype, torch.device)
_PLAIN += (torch.layout, torch.memory_format, np.number, np.bool_, range)
"""Compared by type and value."""
NAMED = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType, MemberDescriptorType)
NAMED += (MethodWrapperType, type(dict.__dict__["fromkeys"]))
"""Of Python's and of modules in C: compared by name."""
_OPEN = (object, dict, list, set, deque, OrderedDict, defaultdict, SimpleNamespace)
"""Classes in C whose objects, and those of classes on them, consist of what can be read of them."""


def is_plain(value: Any) -> bool:
    """Return whether a value is compared by what it is, rather than by where it is."""
    return type(value) in _PLAIN or is_a(value, (np.number, np.bool_)) or type(value) is torch.Size


def digest_of(code: CodeType) -> str:
    """Return what tells code from other code, with its lines and that of functions within it."""
    digest = hashlib.sha256()
    pending = [code]
    while pending:
        each = pending.pop()
        parts: list[Any] = [
            each.co_code,
            each.co_names,
            each.co_varnames,
            each.co_freevars,
            each.co_cellvars,
            each.co_flags,
        ]
        parts += [each.co_argcount, each.co_kwonlyargcount, each.co_posonlyargcount, each.co_qualname]
        parts += [each.co_firstlineno, each.co_linetable, each.co_exceptiontable]
        for constant in each.co_consts:
            if type(constant) is CodeType:
                pending.append(constant)
            parts.append(None if type(constant) is CodeType else _constant(constant))
        digest.update(repr(parts).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _constant(value: Any) -> str:
    if type(value) is frozenset:  # whose order differs between processes
        return f"frozenset{sorted(map(_constant, value))}"
    return f"({', '.join(map(_constant, value))})" if type(value) is tuple else f"{type(value).__name__} {value!r}"


def describe(value: Any, ref: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return what of an object can be no other as long as it is the same one.

    Args:
        value: It.
        ref: Says of a part of it what that is.

    Raises:
        NotKept: Nobody knows what that is.
    """
    kind = type(value)
    if kind is FunctionType:
        return "function", value.__module__, value.__qualname__, digest_of(value.__code__), ref(value.__globals__)
    if is_a(value, type):
        return "class", *_names_of(value), _names_of(type(value))
    if is_a(value, Tensor):
        return "tensor", *_tensor(value)
    if is_a(value, ModuleType):
        return "module", value.__name__
    if is_a(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if not is_known(value):
            raise TraceNotKept(f"it reads the operator {value}, which is none of PyTorch's")
        return "operator", str(value)
    if is_a(value, enum.Enum):
        return "enum", _names_of(kind), value.name, repr(value._value_)
    if is_a(value, WHOLE):
        return "array", _names_of(kind), *_array(value)
    if kind.__module__.startswith("millstream."):
        raise TraceNotKept(f"it reads a {kind.__qualname__} of Millstream's")
    parts = next((parts for of, parts in _PARTS.items() if is_a(value, of)), None)
    if parts is not None:
        return "object", _names_of(kind), *map(ref, parts(value))
    if not all(each in _OPEN or is_written_in_python(each) for each in kind.__mro__):
        raise TraceNotKept(f"it reads a {kind.__module__}.{kind.__qualname__}, which cannot be compared")
    return "object", _names_of(kind)


Named = namedtuple("Named", "number")
_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    (CellType, ContextVar): lambda _: (),
    MappingProxyType: lambda view: (behind(view),),
    (staticmethod, classmethod): lambda wrapper: (wrapper.__func__,),
    property: lambda own: (own.fget, own.fset, own.fdel),
    functools.cached_property: lambda own: (own.func,),
    functools._lru_cache_wrapper: lambda cache: (cache.__wrapped__,),
    MethodType: lambda method: (method.__self__, method.__func__),
    functools.partial: lambda partial: (partial.func, partial.args),
    weakref.ref: lambda reference: (reference(),),
    tuple: tuple.__iter__,
    re.Pattern: lambda pattern: (pattern.pattern, pattern.flags),
    type(Named.number): lambda getter: getter.__reduce__()[1],
    BaseException: lambda error: (error.args,),
    deque: lambda items: (items.maxlen,),
    defaultdict: lambda items: (items.default_factory,),
    **{base: lambda value, base=base: (base.__repr__(value),) for base in (int, float, complex, str, bytes)},
}
"""What objects of classes in C have for good."""


def _names_of(kind: type) -> tuple[str, ...]:
    """A class by its bases, with the special methods of those that a user may have changed: C asks for them."""
    found = []
    for each in kind.__mro__:
        special = (name for name in vars(each) if name.startswith("__") and name.endswith("__") and name not in _OF_ANY)
        own = " ".join(sorted(special)) if is_written_in_python(each) else ""
        found.append(f"{each.__module__}.{each.__qualname__} {own}".rstrip())
    return tuple(found)


_OF_ANY = frozenset(
    """
    __annotations__ __annotate__ __annotations_cache__ __dict__ __doc__ __firstlineno__ __module__ __qualname__
    __slots__ __slotnames__ __static_attributes__ __weakref__ __abstractmethods__ __parameters__ __orig_bases__
    """.split()
)
"""What classes have that says nothing of how their objects behave, some of which comes and goes."""


def _tensor(value: Tensor) -> Sequence[Any]:
    if value.layout is not torch.strided:
        raise TraceNotKept(f"it reads a tensor of layout {value.layout}")
    parts: list[Any] = [
        _names_of(type(value)),
        str(value.dtype),
        str(value.device),
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
    ]
    parts += [value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg()]
    gradient = value.grad if value.is_leaf else None
    return [*parts, None if gradient is None else (tuple(gradient.shape), gradient.stride(), str(gradient.dtype))]


def _array(value: Any) -> Sequence[Any]:
    if type(value) is not np.ndarray or value.dtype.hasobject or value.nbytes > MOST_BYTES:
        raise TraceNotKept(f"it reads a {type(value).__name__}, which is not compared between processes")
    return str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
