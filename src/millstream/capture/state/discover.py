"""Find the modules, optimizers, scalers and tensors that a function reaches.

A function reaches what its closure, the globals its code names, its defaults and its bound object hold; and, from
there, what containers hold, and those attributes of plain objects, classes and functions whose names occur in the code
found so far. What is missed here shows up while tracing and is added then.

**Contract**
- Nothing is called, and no property is evaluated: looking has no side effects.
- Every step on the way is written down, so that a later change on the way can be noticed.

**Steps**
1. Visit the function and the objects among the arguments.
2. Each piece of code found adds names; look at all plain objects and classes again until no name is new.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import io
import operator
import queue
import sys
import threading
import types
import weakref
from collections import ChainMap, Counter, UserDict, UserList, deque
from collections.abc import Container, Iterable, Iterator, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from torch import Generator, Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from millstream._torch.hooks import hooks_of_all_modules, hooks_of_module, hooks_of_optimizer
from millstream.capture.effects.registry import PACKAGES
from millstream.capture.effects.values import Later
from millstream.capture.lines import is_ours, is_users, is_users_own, place_of, told
from millstream.capture.record.location import MISSING, ClassAttributes, ContextValue, Items, Location, SlotAttributes
from millstream.capture.state.code import (
    NAMESPACES,
    Names,
    finds_modules,
    is_users_module,
    names_of,
)
from millstream.capture.state.contents import Answers, is_bytes, is_container, is_element, size_of, without_cache
from millstream.capture.state.generators import GENERATORS, StandsForGenerator
from millstream.errors import CaptureError
from millstream.tree.spec import SCALARS

MAX_ITEMS = 1000
"""A longer container is a data set rather than a list of models: it is not searched."""

MAX_LIBRARY = 500
"""Functions of libraries into whose code the search looks: what others name is found when they run."""

OF_PYTHON = frozenset(
    """
    threading.Event threading.Semaphore threading.Barrier asyncio.locks.Event asyncio.locks.Semaphore
    asyncio.queues.Queue concurrent.futures._base.Future multiprocessing.synchronize.SemLock
    multiprocessing.synchronize.Event weakref.WeakKeyDictionary weakref.WeakValueDictionary _weakrefset.WeakSet
    configparser.RawConfigParser configparser.SectionProxy email.message.Message contextlib._BaseExitStack
    graphlib.TopologicalSorter hmac.HMAC asyncio.locks.Lock asyncio.locks.Condition logging.LoggerAdapter
    xml.etree.ElementTree.ElementTree xml.dom.Node string.Template argparse._ActionsContainer argparse._AttributeHolder
    """.split()
)
"""Classes of Python's library that are looked into as a user's own: what their methods read and change counts."""

_OPAQUE = frozenset(
    """
    _hashlib _blake2 _sha1 _sha2 _sha3 _md5 _hmac zlib _bz2 _lzma _multiprocessing _asyncio _socket sqlite3 mmap select
    """.split()
)
"""Modules in C of objects whose state can be neither compared nor put back."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
"""Likewise."""

_OF_SYS = frozenset({"argv", "path", "meta_path", "path_hooks", "displayhook", "excepthook"})
"""Attributes of ``sys`` that users change."""

_SOURCES = (Iterator, queue.Queue, queue.SimpleQueue)
"""Types that give something else each time, and have it no more."""


T = TypeVar("T")
Named: TypeAlias = list[tuple[str, T]]


@dataclass
class Found:
    """What a function reaches, by name; nothing occurs twice, and disabled scalers do not occur."""

    modules: Named[nn.Module] = field(default_factory=list)
    optimizers: Named[Optimizer] = field(default_factory=list)
    scalers: Named[GradScaler] = field(default_factory=list)
    tensors: Named[Tensor] = field(default_factory=list)
    objects: Named[MutableMapping[str, Any]] = field(default_factory=list)  # attributes of objects, classes, functions
    owners: dict[int, Any] = field(default_factory=dict)  # those objects, classes and functions themselves, by id
    containers: Named[Any] = field(default_factory=list)  # also arrays, trees of XML and what caches have answered
    long: Named[Any] = field(default_factory=list)  # those that have more than ``MAX_ITEMS`` items: none is followed
    names: set[str] = field(default_factory=lambda: {"__call__", "forward"})  # in the code
    cached: list[Any] = field(default_factory=list)  # what ``functools.lru_cache`` has made of functions
    codes: set[types.CodeType] = field(default_factory=set)  # that were looked into
    links: dict[Location, Any] = field(default_factory=dict)  # the steps on the way, and what each led to
    generators: Named[Any] = field(default_factory=list)  # of Python and NumPy, also those whose methods were met
    files: list[Any] = field(default_factory=list)  # open ones
    opaque: dict[int, tuple[str, Any]] = field(default_factory=dict)  # by id, of which nobody can say what they hold
    references: Counter[int] = field(default_factory=Counter)  # on how many ways a tensor, by id, was met by itself


def discover(roots: Iterable[tuple[str, Any]], codes: Container[types.CodeType] | None = None) -> Found:
    """Find everything that ``roots`` (name and object: the function, objects among its arguments) reach.

    Args:
        roots: Where to begin.
        codes: Look into this code only.

    Raises:
        CaptureError: An object does not let itself be looked at.
    """
    search = Search(codes)
    search.extend(roots)
    return search.found


_PLAIN_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """Attributes of which those are followed whose names occur in code."""

    name: str  # of the object
    holder: MutableMapping[str, Any]  # its attributes
    library: frozenset[str] = frozenset()  # names in its class, if that is PyTorch's or Python's, which reads them too


class _Names:
    """Which attributes of which holders are due to be followed: each is, once, when its name is known.

    Holders come in the order in which they were met, and those that are met meanwhile in the next round.
    """

    def __init__(self, found: Found) -> None:
        self.known = found.names
        self.read: set[str] = set()  # those that are not only called as methods
        self._plain: list[_Plain] = []
        self._holding: dict[str, list[int]] = {}  # by name, those that have such an attribute
        self._due: dict[int, set[str]] = {}

    def add(self, names: Iterable[str], *, is_read: bool = False) -> None:
        """Take names to occur in code."""
        for name in names:
            is_new = name not in self.known or (is_read and name not in self.read)
            if is_new:
                self.known.add(name)
                for index in self._holding.get(name, ()):
                    self._due.setdefault(index, set()).add(name)
            if is_read:
                self.read.add(name)

    def add_holder(self, plain: _Plain) -> None:
        """Follow attributes of this, too."""
        index = len(self._plain)
        self._plain.append(plain)
        held = [*plain.holder]
        for name in held:
            self._holding.setdefault(name, []).append(index)
        due = {name for name in held if name in self.known or name in plain.library}
        if due:
            self._due[index] = due

    def take(self) -> Iterator[tuple[_Plain, list[str]]]:
        """Give holders and names in them until none is due; more may be added meanwhile."""
        while self._due:
            for index in sorted(self._due):
                yield self._plain[index], sorted(self._due.pop(index))


class Search:
    """Finds what a function reaches, and later what other functions reach besides.

    Args:
        codes: Look into this code only; otherwise into code of libraries as well, as far as that is near.

    Attributes:
        found: What was found so far.
    """

    def __init__(self, codes: Container[types.CodeType] | None = None) -> None:
        self.found = Found()
        self._codes = codes
        self._names = _Names(self.found)
        self._seen: dict[int, Any] = {}  # id -> object, kept alive so that ids stay unique
        self._linked: set[tuple[int, Any]] = set()
        self._of_module: str | None = None  # the attribute of a module from which the search has come
        # attributes of modules, looked at last; by their names
        self._aside: dict[str, deque[tuple[int, str, dict[str, Any]]]] = {}
        self._num_aside = 0
        # functions of libraries into whose code nobody has looked, by id; and that attribute
        self._closed: dict[int, tuple[str, types.FunctionType, str | None]] = {}
        self._num_opened = 0
        self._library_names: dict[type, frozenset[str]] = {}

    def extend(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Find what these reach besides.

        Raises:
            CaptureError: An object does not let itself be looked at.
        """
        try:
            for name, root in roots:
                self.visit(name, root)
                if id(root) in self._closed:
                    self._open(root)
            for hook in hooks_of_all_modules():
                self.visit("hook", hook)
            self._finish()
        except Exception as error:
            raise CaptureError(
                f"Looking for what the step uses failed: {told(error)}",
                where=place_of(error),
                remedy="Please report it; the step works without ms.step.",
            ) from error

    def _finish(self) -> None:
        """Look at plain objects and classes again until their code yields no new name."""
        self._settle()
        while self._aside:
            name, holder, self._of_module = self._next_aside()
            if isinstance(holder[self._of_module], tuple):
                self.visit(name, holder[self._of_module])
            else:
                self.follow(name, holder, self._of_module)
            self._of_module = None
            self._settle()

    def _put_aside(self, name: str, holder: dict[str, Any], attribute: str) -> None:
        self._aside.setdefault(attribute, deque()).append((self._num_aside, name, holder))
        self._num_aside += 1

    def _next_aside(self) -> tuple[str, dict[str, Any], str]:
        """The first that the code names: what it also reaches by another way is met by that way."""
        attribute = min(self._aside, key=lambda each: (each not in self.found.names, self._aside[each][0][0]))
        _, name, holder = self._aside[attribute].popleft()
        if not self._aside[attribute]:
            del self._aside[attribute]
        return name, holder, attribute

    def _settle(self) -> None:
        """Follow names, and look into code of libraries, until there is none that is near."""
        self._follow_names()
        while self._closed and self._num_opened < MAX_LIBRARY:
            self._num_opened += 1
            self._open(next(iter(self._closed.values()))[1])
            self._follow_names()

    def _open(self, function: types.FunctionType) -> None:
        name, _, attribute = self._closed.pop(id(function))
        before, self._of_module = self._of_module, attribute
        self._visit_code(name, function)
        self._of_module = before

    def _follow_names(self) -> None:
        names = self._names
        for plain, due in names.take():
            holder = plain.holder
            for name in due:
                if name not in holder:
                    continue
                is_read = name in names.read or name in plain.library
                if is_read or not isinstance(holder[name], SCALARS):  # x.step() calls no number
                    self.follow(f"{plain.name}.{name}", holder, name)

    def _watch(self, name: str, holder: MutableMapping[str, Any], library: type | None = None) -> None:
        """Follow attributes by their names.

        Args:
            name: Of the object.
            holder: Its attributes.
            library: Its class, if that is PyTorch's or Python's, whose code reads attributes too.
        """
        read = frozenset[str]() if library is None else self._names_of_library(library)
        self._names.add_holder(_Plain(name, holder, read))

    def _names_of_library(self, kind: type) -> frozenset[str]:
        if kind not in self._library_names:
            self._library_names[kind] = _names_of_class(kind)
        return self._library_names[kind]

    def visit(self, name: str, value: Any) -> None:  # noqa: C901, PLR0912, PLR0915 - one line per kind of thing
        """Look at ``value``, once."""
        if type(value) in weakref.ProxyTypes and (value := _proxied(value)) is None:  # they look like iterators
            return
        if isinstance(value, Tensor):
            self.found.references[id(value)] += 1
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, _BOUND):
            value = value.__self__  # as in ``from random import random`` and ``get = table.get``
        if isinstance(value, (Generator, *_LOCKS)) or type(value).__module__ in _OPAQUE:
            self.found.opaque.setdefault(id(value), (name, value))
            return
        if isinstance(value, (*SCALARS, types.BuiltinFunctionType)) or id(value) in self._seen:
            return
        if _package_of(value) in PACKAGES or issubclass(type(value), (Later, StandsForGenerator)):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.found.tensors.append((name, value))
            self._watch(name, vars(value))
        elif isinstance(value, nn.Module):
            self._visit_module(name, value)
        elif isinstance(value, Optimizer) and vars(value).keys() >= _OF_OPTIMIZERS:
            self.found.optimizers.append((name, value))
            self._visit_class(name, type(value))
            self._linked.update((id(vars(value)), key) for key in _own_of_optimizers())
            self._watch(name, vars(value))
            for parameter in (parameter for group in value.param_groups for parameter in group["params"]):
                self._visit_tensor(name, parameter)
            for hook in hooks_of_optimizer(value):
                self.visit(f"{name}.hook", hook)
            groups = ((f"{name}.param_groups[{number}]", group) for number, group in enumerate(value.param_groups))
            for where, held in (*groups, *((f"{name}.state of a parameter", each) for each in value.state.values())):
                for key, each in held.items() if isinstance(held, dict) else ():
                    if not isinstance(each, (Tensor, *SCALARS, list, dict, tuple)):  # guards know these by themselves
                        self.visit(f"{where}[{key!r}]", each)
        elif isinstance(value, GENERATORS):
            self.found.generators.append((name, value))
        elif isinstance(value, GradScaler):
            if value.is_enabled():
                self.found.scalers.append((name, value))
        elif isinstance(value, io.IOBase):
            self.found.files.append(value)
        elif isinstance(value, _SOURCES):  # refused where they are asked
            pass
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, types.MethodType):
            owner = name if isinstance(value.__self__, GENERATORS) else name.rpartition(".")[0] or "self"
            self.visit(owner, value.__self__)
            self.visit(name, value.__func__)
        elif isinstance(value, functools.partial):
            self.visit(name, value.func)
            self.visit(f"{name}.args", value.args)
            self.visit(f"{name}.keywords", value.keywords)
            self._visit_attributes(name, vars(value))
        elif isinstance(value, staticmethod | classmethod):
            self.visit(name, value.__func__)
        elif isinstance(value, property):
            self.visit(name, value.fget)
        elif isinstance(value, functools.cached_property):
            self.visit(name, value.func)
        elif isinstance(value, functools._lru_cache_wrapper):
            function = without_cache(value)
            if isinstance(function, types.FunctionType):
                self.found.cached.append(value)
            self.visit(name, value.__wrapped__)
            if not isinstance(function, types.FunctionType) or is_users(function.__code__.co_filename):
                self._visit_container(f"{name}()", Answers(value))
        elif isinstance(value, tuple | frozenset) or is_container(value):
            self._visit_container(name, value)
        elif isinstance(value, _VIEWS):
            for held in gc.get_referents(value):
                if isinstance(held, dict) and "__module__" not in held:  # of a class, which is met by itself
                    self.visit(name, held)
        elif isinstance(value, ContextVar):
            self.follow(f"{name}.get()", ContextValue.of(value), "value")
        elif isinstance(value, weakref.ref):  # and no link, which would keep it alive
            self.visit(f"{name}()", value())
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            paths = (each for each in value.__reduce__()[1] if isinstance(each, str))
            self._names.add((part for path in paths for part in path.split(".")), is_read=True)
        elif type(value).__module__ == "multiprocessing.sharedctypes":
            self.visit(name, vars(value).get("_obj"))
        elif isinstance(value, UserDict | UserList | ChainMap):
            content = "maps" if isinstance(value, ChainMap) else "data"
            self.follow(f"{name}.{content}", vars(value), content)
            self._visit_object(name, value)
        elif isinstance(value, types.ModuleType):
            if is_users_module(value):
                self._watch(name, vars(value))
        elif isinstance(value, type):
            self._visit_class(name, value)
        else:
            self._visit_object(name, value)

    def follow(self, name: str, holder: Any, key: Any) -> None:
        """Go from ``holder`` to what it holds at ``key``, and write the step down."""
        if (id(holder), key) in self._linked:
            return
        self._linked.add((id(holder), key))
        if isinstance(holder, types.CellType):
            try:
                value = holder.cell_contents
            except ValueError:  # not assigned yet
                return
        else:
            value = holder[key] if isinstance(holder, list) else holder.get(key, MISSING)
        if isinstance(holder, list) and issubclass(type(value), Later):  # which a trace has appended
            return
        if not (isinstance(holder, ClassAttributes) and isinstance(value, _NEVER_REPLACED)):
            self.found.links[Location(holder, key, name)] = value
        self.visit(name, value)

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        code = function.__code__
        if not is_users(code.co_filename):
            self._visit_wrapper(name, function)
            return
        self._visit_attributes(name, vars(function))
        if self._codes is not None and code not in self._codes:
            return
        if not is_users_own(code.co_filename):
            self._closed[id(function)] = name, function, self._of_module
            self._visit_wrapper(name, function)
        else:
            self._visit_code(name, function)

    def _visit_code(self, name: str, function: types.FunctionType) -> None:
        """Look at what the code of a function names, and at what is kept with it."""
        code = function.__code__
        names = names_of(code)
        self.found.codes |= names.codes
        self.found.owners[id(function)] = function
        parent = name.rpartition(".")[0]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.follow(variable, cell, None)
        self._names.add(names.read & names.all, is_read=True)
        self._names.add(names.told, is_read=True)
        self._visit_imports(names, function.__globals__.get("__package__"))
        self._names.add(names.all)
        told = names.told if "globals" in names.globals else set()
        for variable in sorted(told | names.all & names.globals):
            if variable in function.__globals__:
                self.follow(variable, function.__globals__, variable)
        for variable in (told | names.stored | names.globals).difference(
            function.__globals__
        ):  # of ``builtins`` so far
            self.found.links[Location(function.__globals__, variable, variable)] = MISSING
        for position, default in enumerate(function.__defaults__ or ()):
            self.visit(f"{parent}default[{position}]", default)
        for variable in function.__kwdefaults__ or {}:
            self.follow(variable, function.__kwdefaults__, variable)
        wrapped = vars(function).get("__wrapped__")
        if wrapped is not None:
            self.visit(name, wrapped)

    def _visit_imports(self, names: Names, package: str | None) -> None:
        """Look at modules that code imports while it runs, or finds: those of the user's own."""
        for level, path, variable in sorted(names.imported):
            self._visit_import("." * level + path, package, variable)
        for variable in _OF_SYS.intersection(names.read) if "sys" in names.all else ():
            self.follow(f"sys.{variable}", vars(sys), variable)
        if finds_modules(names):
            for path, module in sys.modules.copy().items():  # at once: a collection, or a thread, may import
                if isinstance(module, types.ModuleType) and is_users_module(module, is_users_own):
                    self.visit(path, module)

    def _visit_import(self, path: str, package: str | None, variable: str) -> None:
        """Look at a module that code imports while it runs, at the packages that hold it, or at a variable in it."""
        with suppress(ImportError, ValueError):  # a relative name beyond the package
            path = importlib.util.resolve_name(path, package)
        if variable:
            module = sys.modules.get(path)
            if module is not None and is_users_module(module):
                self.follow(f"{path}.{variable}", vars(module), variable)
            return
        while path:
            if path in sys.modules:
                self.visit(path, sys.modules[path])
            path = path.rpartition(".")[0]

    def _visit_wrapper(self, name: str, function: types.FunctionType) -> None:
        """Look at what a decorator of a library's has wrapped, such as ``torch.no_grad()``."""
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                if isinstance(cell.cell_contents, (types.FunctionType, types.MethodType, functools.partial)):
                    self.visit(name, cell.cell_contents)
        self.visit(name, vars(function).get("__wrapped__"))
        self.visit(f"{name}.registry", vars(function).get("registry"))  # of ``functools.singledispatch``

    def _visit_container(self, name: str, value: Any) -> None:
        if is_users(file_of(type(value))):
            if hasattr(value, "__dict__"):
                self._visit_object(name, value)
            value = Items.of(value) if isinstance(value, dict) else value
        if (value.size if isinstance(value, np.ndarray) else size_of(value)) > MAX_ITEMS:
            if is_container(value):
                self.found.long.append((name, value))
            return
        if is_container(value):
            self.found.containers.append((name, value))
        if isinstance(value, dict | Items):
            for key in list(value):
                told = repr(key) if type(key) in SCALARS else f"<{type(key).__name__}>"  # whose repr is the user's
                self.follow(f"{name}[{told}]", value, key)
        elif isinstance(value, list):
            for index in range(len(value)):
                self.follow(f"{name}[{index}]", value, index)
        elif not is_bytes(value) and not is_element(value):
            for index, item in enumerate(value):
                self.visit(f"{name}[{index}]", item)

    def _visit_class(self, name: str, kind: type) -> None:
        if type(kind) is not type and id(type(kind)) not in self._seen:
            self._visit_class(name, type(kind))
        for base in kind.__mro__:
            if id(base) not in self._seen or base is kind:
                self._seen[id(base)] = base
                if is_users(file_of(base)):  # which may hide later what it inherits
                    self.found.owners[id(base)] = base
                    self._visit_attributes(name, ClassAttributes.of(base))

    def _visit_object(self, name: str, value: Any) -> None:
        kind: Any = type(value)
        self._visit_class(name, kind)
        is_library = kind.__module__.startswith(_VISITED) and is_ours(file_of(kind))
        is_library |= any(f"{base.__module__}.{base.__qualname__}" in OF_PYTHON for base in kind.__mro__)
        if not is_users(file_of(kind)) and kind not in NAMESPACES and not is_library:
            return
        self.found.owners[id(value)] = value
        library = kind if is_library else None
        if hasattr(value, "__dict__"):
            self._visit_attributes(name, vars(value), library)
        slots = SlotAttributes.of(value)
        if slots.members:
            self._visit_attributes(name, slots, library)

    def _visit_attributes(self, name: str, holder: MutableMapping[str, Any], library: type | None = None) -> None:
        self._watch(name, holder, library)
        self.found.objects.append((name, holder))

    def _visit_tensor(self, name: str, tensor: Tensor) -> None:
        """Look at attributes that a user has given it, such as a factor for its learning rate."""
        if vars(tensor):
            self._watch(name, vars(tensor))

    def _visit_module(self, name: str, root: nn.Module) -> None:
        self.found.modules.append((name, root))
        for prefix, module in root.named_modules(prefix=name):
            self._seen[id(module)] = module
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._visit_tensor(f"{prefix}.{key}", tensor)
            for hook in hooks_of_module(module):
                self.visit(f"{prefix}.hook", hook)
            if type(module) not in _TORCH_MODULES:
                self._visit_class(prefix, type(module))
            for attribute, value in list(vars(module).items()):
                if attribute in _PLAIN_MODULE_ATTRIBUTES or isinstance(value, SCALARS):
                    continue
                self._put_aside(f"{prefix}.{attribute}", vars(module), attribute)


_VIEWS = (*map(type, ({}.keys(), {}.values(), {}.items())), types.MappingProxyType)
"""Kinds of views of a dict."""

_BOUND = (*GENERATORS, dict, list, set, deque)
"""Kinds of objects to which methods in C that are kept lead."""

_VISITED = ("torch.optim.lr_scheduler", "torch.distributions")
"""Modules of PyTorch's whose objects users look into; modules and optimizers apart."""

_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
"""Attributes of an optimizer; what only wraps one, as ``accelerate`` does, has properties of these names."""

_TORCH_MODULES = frozenset(value for value in vars(nn).values() if isinstance(value, type))

_NEVER_REPLACED = (types.MemberDescriptorType, types.GetSetDescriptorType)
"""What Python makes of slots, in classes: not worth a look in every call."""


@functools.cache
def _own_of_optimizers() -> frozenset[str]:
    """Attributes that every optimizer has: they are known otherwise, or of no matter to a graph.

    Asked late: to make one imports PyTorch's compilers, which takes seconds.
    """
    return frozenset(vars(SGD([nn.Parameter()]))) - {"defaults"}


def _names_of_class(kind: type) -> frozenset[str]:
    """Names in the methods of a class."""
    names: set[str] = set()
    for value in (value for base in kind.__mro__ for value in vars(base).values()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", None) or getattr(value, "wrapped", value)
        if isinstance(function, types.FunctionType):
            names |= names_of(function.__code__).read
    return frozenset(names)


def is_own_method(kind: type, name: str) -> bool:
    """Whether ``kind`` has a method from others than PyTorch, in whose place an object of it may have a function."""
    base = next((base for base in kind.__mro__ if name in vars(base)), object)
    is_method = isinstance(vars(base).get(name), types.FunctionType | classmethod | staticmethod)
    return is_method and not name.startswith("__") and base.__module__.partition(".")[0] != "torch"


def _proxied(proxy: Any) -> Any:
    """What a weak proxy stands for; ``None`` where that is gone."""
    with contextlib.suppress(ReferenceError):
        return proxy.__repr__.__self__
    return None


def _package_of(value: Any) -> str:
    """Of a class or function, or of an object's class."""
    module = getattr(value if isinstance(value, type | types.FunctionType) else type(value), "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


_files: WeakKeyDictionary[type, str] = WeakKeyDictionary()  # a class holds all of its module, which may be a user's


def file_of(kind: type) -> str:
    """Where a class was written."""
    found = _files.get(kind)
    if found is None:
        try:
            found = inspect.getfile(kind)
        except (TypeError, OSError):  # built in, or made in an interactive session
            found = "<frozen>" if kind.__module__ in ("builtins", "collections", "typing") else "<interactive>"
        _files[kind] = found
    return found


def walk_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, MutableMapping[str, Any], str, Tensor]]:
    """Names, holders, keys and tensors of all parameters and buffers within ``module``, shared ones each time."""
    for path, part in module.named_modules(prefix=prefix):
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield f"{path}.{key}", holder, key, tensor
