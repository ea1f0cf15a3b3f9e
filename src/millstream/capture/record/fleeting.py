"""Values that another process may find otherwise, though all that a step reads there is equal.

Such is the order of a set of texts, whether two equal texts are one object, a text with an address in it, and whatever
a function in C knows of the process: its number, a file, a clock, a context of its own. Within a process none of it
changes by itself, so that no guard looks there; what a later process takes for its own must not depend on it.

**Contract**
- A function or class in C counts as fleeting unless it stands here as one that depends on what it is given alone.
"""

from __future__ import annotations

import builtins
import enum
import operator
import sys
from collections import deque
from collections.abc import Iterable
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from millstream.capture.lines import is_ours, is_pythons, is_users_own
from millstream.capture.record.reads import IS_HEAP_TYPE, find_in_class, is_a

_DESCRIPTORS = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
_DESCRIPTORS += (GetSetDescriptorType, MemberDescriptorType, MethodWrapperType)
IN_C = (BuiltinFunctionType, *_DESCRIPTORS)
"""Classes of functions and descriptors in C."""

_MODULES = frozenset(
    """
    _abc _bisect _collections _contextvars _csv _elementtree _functools _hashlib _heapq _json _md5 _operator _random
    _sha1 _sha2 _sha256 _sha512 _sre _statistics _string _struct _warnings _weakref binascii builtins cmath collections
    contextlib functools itertools math numpy operator pybind11_builtins re string torch types
    typing weakref xml zlib
    """.split()
)
"""Whose functions and classes in C depend on what they are given; or on what is compared otherwise, as in PyTorch."""
_OF_PROCESS = frozenset(
    {f"builtins.{name}" for name in "id hash dir open input eval exec compile __import__ breakpoint".split()}
    | {f"builtins.{kind}.{name}" for kind in ("object", "str", "bytes") for name in ("__hash__", "__sizeof__")}
    | {f"builtins.{kind}.__dir__" for kind in ("object", "type", "module")}
    | {f"builtins.BaseException.{name}" for name in "__cause__ __context__ __traceback__ __suppress_context__".split()}
    | {f"builtins.function.{name}" for name in ("__builtins__", "__type_params__")}
    | {f"functools._lru_cache_wrapper.{name}" for name in ("cache_info", "cache_clear")}
    | {"builtins.type.__subclasses__", "builtins.type.mro", "builtins.frame", "builtins.code.co_filename"}
    | {f"torch._C.{name}" for name in "TensorBase.data_ptr _cuda_memoryStats _cuda_getMemoryInfo".split()}
)
"""Such ones of these modules as tell of the process, or read what nobody compares."""
_SUBMODULES = ("numpy.random.", "torch._C._distributed", "torch._C._cuda_memory", "builtins.frame.")
_SUBMODULES += ("builtins.generator.gi_", "builtins.traceback.")
_HARMLESS = frozenset(
    {
        "gc.collect",
        "sys.exc_info",
        "sys.intern",
        "posix.fspath",
        "nt.fspath",
        "_io.StringIO",
        "_io.BytesIO",
        "_thread.allocate_lock",
        "_thread.lock",
        "_thread.RLock",
    }
)
"""Of other modules, what may be called."""
_FOR_LIBRARIES = frozenset(
    {
        "builtins.id",
        "builtins.hash",
        "sys._getframe",
        "_thread.get_ident",
        "builtins.frame",
        "builtins.code.co_filename",
    }
    | {f"builtins.frame.{name}" for name in ("f_back", "f_code", "f_globals", "f_lineno")}
)
"""What PyTorch and Python's library use without telling what it gives."""
_FOR_HASH = frozenset({"builtins.id", "builtins.hash", *(f"builtins.{kind}.__hash__" for kind in ("object", "str"))})
"""What a method that a dict or set asks may use: nobody learns of it."""
_CLOCKS_AND_FILES = ("time.", "posix.", "_io.", "sys.", "_thread.", "datetime.")
"""What code that logs and meters uses: what a step does with it is an effect, or refused."""
_LOGGING = ("/logging/", "/tqdm/", "/warnings.py", "/linecache.py", "/traceback.py", "/tokenize.py", "/threading.py")

_FORGETS_ORDER = frozenset(
    """
    len set frozenset isinstance issubclass type callable bool any all super getattr hasattr setattr append add insert
    setdefault get index count remove discard update intersection_update difference_update symmetric_difference_update
    union intersection difference symmetric_difference issubset issuperset isdisjoint copy clear __len__ __contains__
    __setitem__ __eq__ __ne__ __le__ __lt__ __ge__ __gt__ __or__ __and__ __sub__ __xor__ __ior__ __iand__ __isub__
    __ixor__ __init__ __new__ __setattr__ __getattribute__ __class__ ref proxy
    """.split()
)
"""Functions in C that do not tell the order of a set that they are given."""
_COMPARING = frozenset("index count remove __contains__ contains countOf indexOf eq ne __eq__ __ne__".split())
_OF_SET_ALONE = frozenset({"update", "__init__", "__new__", "copy", "__or__", "__ior__"})
_SHOWING = frozenset({"str", "repr", "format", "print", "ascii", "format_map", "__str__", "__repr__", "__format__"})
_LAST = {str: "\xff", bytes: b"\xff"}
"""Of texts with one character, the last that is one object in the whole process."""
_DEPTH = 4
_MOST_ITEMS = 1000
_SETS = (set, frozenset)
_NUMBERS = (bool, int, float, complex)


def of_native(value: Any, code: CodeType | None = None) -> str:
    """Return why it is fleeting what a function, class or descriptor in C gives to some code; empty where it is not.

    Args:
        value: It, or a class in Python.
        code: What has it; ``None`` for code of PyTorch's or Python's.
    """
    if is_a(value, type) and (is_written_in_python(value) or value.__module__.startswith("millstream.")):
        return ""
    is_place = type(value) in (MemberDescriptorType, GetSetDescriptorType)
    if is_place and is_written_in_python(value.__objclass__):  # a slot or ``__dict__``, which is read
        return ""
    name = name_of(value)
    if name in _HARMLESS or _is_known(name):
        return ""
    file = "" if code is None else code.co_filename
    if code is None or is_ours(file) or is_pythons(file):
        if name in _FOR_LIBRARIES or (name.startswith(_CLOCKS_AND_FILES) and any(each in file for each in _LOGGING)):
            return ""
    elif name in _FOR_HASH and code.co_name == "__hash__":  # which a dict or set asks
        return ""
    return name


def is_written_in_python(kind: type) -> bool:
    """Return whether a class statement has made a class, so that its objects have attributes and slots alone."""
    return bool(kind.__flags__ & IS_HEAP_TYPE) and not any(_is_in_c(each, kind) for each in vars(kind).values())


def _is_in_c(value: Any, kind: type) -> bool:
    """Return whether what a class has was put there by a module in C that has made the class."""
    if type(value) is BuiltinFunctionType:
        return value.__self__ is kind
    if type(value) is GetSetDescriptorType and value.__name__ in ("__dict__", "__weakref__"):
        return False
    is_own = type(value) in _DESCRIPTORS and type(value) is not MemberDescriptorType and value.__objclass__ is kind
    return is_own or type(value).__name__ == "instancemethod"


def _is_known(name: str) -> bool:
    return name.partition(".")[0] in _MODULES and name not in _OF_PROCESS and not name.startswith(_SUBMODULES)


def name_of(value: Any) -> str:
    """Of a function, class or descriptor in C: its module, class and name."""
    if is_a(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    kind = getattr(value, "__objclass__", None)
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__name__", type(value).__qualname__)
    if kind is None and owner is not None and not is_a(owner, ModuleType):
        kind = owner if is_a(owner, type) else type(owner)
        kind = next((base for base in kind.__mro__ if name in vars(base)), kind)  # such as of ``Function.apply``
    if kind is None or kind.__module__ == "pybind11_builtins" or kind.__name__ == "PyCapsule":
        return f"{getattr(value, '__module__', None) or getattr(owner, '__name__', 'builtins')}.{name}"
    return f"{kind.__module__}.{kind.__qualname__}.{name}"


def of_call(function: Any, arguments: tuple[Any, ...]) -> str:
    """Return why it is fleeting what a function in C gives for these arguments, of a method with its object."""
    name = getattr(function, "__name__", "")
    shows = any(each is shower for each in arguments for shower in (str, repr, format)) and name not in _FORGETS_ORDER
    if name in _SHOWING or shows:
        for each in arguments:
            if reason := of_text(each):
                return reason
    if name in ("_abc_instancecheck", "_abc_subclasscheck") and len(arguments) == 2:
        return of_registry(*arguments)
    if function in (operator.is_, operator.is_not) and len(arguments) == 2:
        return of_identity(*arguments)
    if name in _COMPARING and (reason := of_nan(*arguments)):
        return reason
    owner_is_set = bool(arguments) and is_a(arguments[0], _SETS)
    if name in _FORGETS_ORDER and not (name in _OF_SET_ALONE and not (owner_is_set or function in _SETS)):
        return ""
    if name in ("sorted", "min", "max") and all(type(each) is bool for each in arguments[1:]):
        return ""
    for each in arguments:
        if reason := of_order(each, _DEPTH):
            return reason
    return ""


def of_order(value: Any, depth: int = 1) -> str:
    """Return why the order is fleeting in which something is gone through.

    It is a set, or has one in it to some depth.
    """
    if is_a(value, _SETS):
        items = [*set.__iter__(value)] if is_a(value, set) else [*frozenset.__iter__(value)]
        return "the order of a set" if len(items) > 1 and not all(map(_is_hashed_alike, items)) else ""
    if depth > 1 and type(value) in (list, tuple, dict, deque) and len(value) <= _MOST_ITEMS:
        for each in value.values() if type(value) is dict else value:
            if reason := of_order(each, depth - 1):
                return reason
    return ""


def _is_hashed_alike(value: Any) -> bool:
    """Return whether the hash of something is the same in each process."""
    return type(value) in _NUMBERS or (type(value) is tuple and all(map(_is_hashed_alike, value)))


def of_identity(one: Any, other: Any) -> str:
    """Return why it is fleeting whether two values are one object: they are equal, and may or may not be."""
    kind = type(one)
    if kind is not type(other) or kind not in (int, float, complex, str, bytes, tuple, range, torch.Size):
        return ""
    if (kind is int and -5 <= one <= 256) or (kind in (str, bytes) and len(one) < 2 and one <= _LAST[kind]):
        return ""
    if kind in (tuple, torch.Size):
        return "whether two tuples are one" if len(one) == len(other) > 0 else ""
    return f"whether two equal {kind.__name__} are one" if one == other else ""


def of_registry(base: Any, value: Any) -> str:
    """Return why it is fleeting whether an abstract class counts something, or a class, among its own."""
    kind = value if is_a(value, type) else type(value)
    file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
    is_theirs = not _is_of_library(base) and is_users_own(file)
    if base in kind.__mro__ or (_is_of_library(kind) and not is_theirs):  # a library asks whether it is a mapping, say
        return ""
    return f"which classes are registered with {base.__qualname__}"


def _is_of_library(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "numpy", "millstream")


def of_nan(*values: Any) -> str:
    """Return why it is fleeting whether something is among others: no NaN equals another, but each is itself."""
    if any(type(each) is float and each != each for each in values):
        return "whether two NaNs are one"
    parts = (each.values() if type(each) is dict else each for each in values if type(each) in (list, tuple, dict))
    return next(filter(None, (of_nan(*each) for each in parts if len(each) <= _MOST_ITEMS)), "")


def of_text(value: Any, depth: int = _DEPTH) -> str:
    """Return why the text is fleeting that Python makes of something.

    It has an address in it, or the order of a set.
    """
    kind = type(value)
    if kind in (*_NUMBERS, str, bytes, type(None)) or is_a(value, type | torch.Tensor | enum.Enum):
        return ""
    if is_a(value, (*_SETS, list, tuple, dict, deque)):
        if reason := of_order(value):
            return reason
        items: Iterable[Any] = (*value.keys(), *value.values()) if type(value) is dict else value
        if depth and type(value) in (*_SETS, list, tuple, dict, deque) and len(value) <= _MOST_ITEMS:
            return next(filter(None, (of_text(each, depth - 1) for each in items)), "")
        return ""
    if is_a(value, FunctionType | MethodType | CodeType) or (is_a(value, BuiltinFunctionType) and _has_owner(value)):
        return "the address of a function"
    shown = [find_in_class(kind, name)[1] for name in ("__format__", "__str__", "__repr__")]
    is_default = [
        each is vars(object)[name] for each, name in zip(shown, ("__format__", "__str__", "__repr__"), strict=True)
    ]
    return f"the address of a {kind.__qualname__}" if all(is_default) else ""


def _has_owner(function: Any) -> bool:
    return not is_a(getattr(function, "__self__", builtins), ModuleType | type)
