"""Find the modules, optimizers, scalers and tensors that a function reaches, before it is traced.

A function reaches what its closure, the globals its code names, its defaults and its bound object hold; and, from
there, what containers hold, and those attributes of plain objects, classes and functions whose names occur in the code
found so far. What is missed here shows up while tracing: the step is then traced again, with that among the roots. So
this need not know all ways, only those that most programs go.

**Contract**
- Nothing is called, and no property is evaluated: looking has no side effects.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import IOBase
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream._torch.autograd.hooks import hooks_of_all_modules, hooks_of_module, hooks_of_optimizer
from millstream.capture.effects.host_generators import GENERATORS
from millstream.capture.effects.late_values import Later
from millstream.capture.effects.output_libraries import PACKAGES
from millstream.capture.lines import is_ours, is_users, is_users_own, place_of, told
from millstream.capture.record.location import MISSING, ClassAttributes, Items, Location, SlotAttributes
from millstream.capture.record.reads import WHOLE
from millstream.capture.state.code import NAMESPACES, is_users_module, names_of
from millstream.capture.state.contents import Answers, is_container, without_cache
from millstream.errors import CaptureError
from millstream.tree.spec import SCALARS

MAX_ITEMS = 1000
"""A longer container is a data set rather than a list of models: it is not searched."""

MAX_LIBRARY = 500
"""Functions of libraries into whose code the search looks."""

T = TypeVar("T")
Named: TypeAlias = list[tuple[str, T]]


@dataclass
class Found:
    """The objects that a function reaches, by name; nothing occurs twice, and disabled scalers do not occur."""

    modules: Named[nn.Module] = field(default_factory=list)
    optimizers: Named[Optimizer] = field(default_factory=list)
    scalers: Named[GradScaler] = field(default_factory=list)
    tensors: Named[Tensor] = field(default_factory=list)
    cached: list[Any] = field(default_factory=list)  # what ``functools.lru_cache`` has made of functions
    codes: set[types.CodeType] = field(default_factory=set)  # that were looked into
    places: list[Location] = field(default_factory=list)  # on the way


def discover(roots: Iterable[tuple[str, Any]], codes: Container[types.CodeType] | None = None) -> Found:
    """Find everything that ``roots`` (name and object: the function, objects among its arguments) reach.

    Args:
        roots: Where to begin.
        codes: Look into this code only; otherwise into code of libraries as well, as far as that is near.

    Raises:
        CaptureError: An object does not let itself be looked at.
    """
    search = _Search(codes)
    try:
        search.run(roots)
    except Exception as error:
        raise CaptureError(
            f"Looking for what the step uses failed: {told(error)}",
            where=place_of(error),
            remedy="Please report it; the step works without ms.step.",
        ) from error
    return search.found


_PLAIN_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class _Names:
    """The attributes of holders that are due to be followed: each is, once, when its name is known.

    Holders come in the order in which they were met, and those that are met meanwhile in the next round.
    """

    def __init__(self) -> None:
        self.known = {"__call__", "forward"}
        self.read: set[str] = set()  # those that are not only called as methods
        self._holders: list[tuple[str, MutableMapping[str, Any]]] = []
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

    def add_holder(self, name: str, holder: MutableMapping[str, Any]) -> None:
        """Follow attributes of this, too, whose name is given."""
        index = len(self._holders)
        self._holders.append((name, holder))
        for key in [*holder]:
            self._holding.setdefault(key, []).append(index)
        if due := self.known.intersection(holder):
            self._due[index] = due

    def take(self) -> Iterator[tuple[str, MutableMapping[str, Any], list[str]]]:
        """Give holders and names in them until none is due; more may be added meanwhile."""
        while self._due:
            for index in sorted(self._due):
                yield *self._holders[index], sorted(self._due.pop(index))


class _Search:
    def __init__(self, codes: Container[types.CodeType] | None) -> None:
        self.found = Found()
        self._codes = codes
        self._names = _Names()
        self._seen: dict[int, Any] = {}  # id -> object, kept alive so that ids stay unique
        self._linked: set[tuple[int, Any]] = set()
        self._aside: deque[tuple[str, dict[str, Any], str]] = deque()  # attributes of modules, looked at last
        # functions of libraries into whose code nobody has looked, by id
        self._closed: dict[int, tuple[str, types.FunctionType]] = {}

    def run(self, roots: Iterable[tuple[str, Any]]) -> None:
        for name, root in roots:
            self.visit(name, root)
            if id(root) in self._closed:
                self._visit_code(*self._closed.pop(id(root)))
        for hook in hooks_of_all_modules():
            self.visit("hook", hook)
        num_opened = 0
        self._follow_names()
        while self._aside or (self._closed and num_opened < MAX_LIBRARY):
            if self._closed and num_opened < MAX_LIBRARY:
                num_opened += 1
                self._visit_code(*self._closed.pop(next(iter(self._closed))))
            else:
                self.follow(*self._aside.popleft())
            self._follow_names()

    def _follow_names(self) -> None:
        for name, holder, due in self._names.take():
            for key in due:
                is_called = key not in self._names.read
                if key in holder and not (is_called and isinstance(holder[key], SCALARS)):  # x.step() calls no number
                    self.follow(f"{name}.{key}", holder, key)

    def visit(self, name: str, value: Any) -> None:  # noqa: C901, PLR0912 - one line per kind of thing
        """Look at ``value``, once."""
        if type(value) in weakref.ProxyTypes or isinstance(value, _CLOSED) or id(value) in self._seen:
            return
        if _package_of(value) in PACKAGES or issubclass(type(value), Later):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.found.tensors.append((name, value))
        elif isinstance(value, nn.Module):
            self._visit_module(name, value)
        elif is_optimizer(value):
            self._visit_optimizer(name, value)
        elif isinstance(value, GradScaler):
            if value.is_enabled():
                self.found.scalers.append((name, value))
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, types.MethodType):
            self.visit(name.rpartition(".")[0] or "self", value.__self__)
            self.visit(name, value.__func__)
        elif isinstance(value, functools.partial):
            self.visit(name, value.func)
            self.visit(f"{name}.args", value.args)
            self.visit(f"{name}.keywords", value.keywords)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(name, value.__func__)
        elif isinstance(value, property):
            self.visit(name, value.fget)
        elif isinstance(value, functools.cached_property):
            self.visit(name, value.func)
        elif isinstance(value, functools._lru_cache_wrapper):
            if isinstance(without_cache(value), types.FunctionType):
                self.found.cached.append(value)
            self.visit(name, value.__wrapped__)
            self.visit(f"{name}()", tuple(Answers(value)))
        elif isinstance(value, tuple | frozenset) or is_container(value):
            self._visit_container(name, value)
        elif isinstance(value, weakref.ref):
            self.visit(f"{name}()", value())
        elif isinstance(value, types.ModuleType):
            if is_users_module(value):
                self._names.add_holder(name, vars(value))
        elif isinstance(value, type):
            self._visit_class(name, value)
        else:
            self._visit_object(name, value)

    def follow(self, name: str, holder: Any, key: Any) -> None:
        """Go from ``holder`` to what it holds at ``key``, and write the step down."""
        if (id(holder), key) in self._linked:
            return
        self._linked.add((id(holder), key))
        value = Location(holder, key).get() if isinstance(holder, types.CellType | list) else holder.get(key, MISSING)
        if value is not MISSING:
            self.found.places.append(Location(holder, key, name))
            self.visit(name, value)

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        code = function.__code__
        if not is_users(code.co_filename):
            self._visit_wrapper(name, function)
            return
        self._names.add_holder(name, vars(function))
        if self._codes is not None and code not in self._codes:
            return
        if not is_users_own(code.co_filename):
            self._closed[id(function)] = name, function
            self._visit_wrapper(name, function)
        else:
            self._visit_code(name, function)

    def _visit_code(self, name: str, function: types.FunctionType) -> None:
        """Look at what the code of a function names, and at what is kept with it."""
        code = function.__code__
        names = names_of(code)
        self.found.codes |= names.codes
        parent = name.rpartition(".")[0]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.follow(variable, cell, None)
        self._names.add((names.read & names.all) | names.told, is_read=True)
        self._names.add(names.all)
        for variable in sorted(names.all & names.globals & function.__globals__.keys()):
            self.follow(variable, function.__globals__, variable)
        for position, default in enumerate(function.__defaults__ or ()):
            self.visit(f"{parent}default[{position}]", default)
        for variable in function.__kwdefaults__ or {}:
            self.follow(variable, function.__kwdefaults__, variable)
        self.visit(name, vars(function).get("__wrapped__"))

    def _visit_wrapper(self, name: str, function: types.FunctionType) -> None:
        """Look at what a decorator of a library's has wrapped, such as ``torch.no_grad()``."""
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                if isinstance(cell.cell_contents, (types.FunctionType, types.MethodType, functools.partial)):
                    self.visit(name, cell.cell_contents)
        self.visit(name, vars(function).get("__wrapped__"))
        self.visit(
            f"{name}.registry", tuple((vars(function).get("registry") or {}).values())
        )  # of ``functools.singledispatch``

    def _visit_container(self, name: str, value: Any) -> None:
        if is_users(file_of(type(value))):
            if hasattr(value, "__dict__"):
                self._visit_object(name, value)
            value = Items.of(value) if isinstance(value, dict) else _as_built_in(value)
        if len(value) > MAX_ITEMS:
            return
        if isinstance(value, dict | Items):
            for key in list(value):
                told = repr(key) if type(key) in SCALARS else f"<{type(key).__name__}>"  # whose repr is the user's
                self.follow(f"{name}[{told}]", value, key)
        elif isinstance(value, list):
            for index in range(len(value)):
                self.follow(f"{name}[{index}]", value, index)
        else:
            for index, item in enumerate(value):
                self.visit(f"{name}[{index}]", item)

    def _visit_class(self, name: str, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen or base is kind:
                self._seen[id(base)] = base
                if is_users(file_of(base)):  # which may hide later what it inherits
                    self._names.add_holder(name, ClassAttributes.of(base))

    def _visit_object(self, name: str, value: Any) -> None:
        kind: Any = type(value)
        self._visit_class(name, kind)
        is_library = kind.__module__.startswith(_VISITED) and is_ours(file_of(kind))
        if not is_users(file_of(kind)) and kind not in NAMESPACES and not is_library:
            return
        for key in [*vars(value)] if is_library else ():
            self.follow(f"{name}.{key}", vars(value), key)
        if hasattr(value, "__dict__"):
            self._names.add_holder(name, vars(value))
        slots = SlotAttributes.of(value)
        if slots.members:
            self._names.add_holder(name, slots)

    def _visit_optimizer(self, name: str, optimizer: Optimizer) -> None:
        self.found.optimizers.append((name, optimizer))
        self._visit_class(name, type(optimizer))
        own = vars(optimizer)
        self._linked.update((id(own), key) for key in own if key in _OF_OPTIMIZERS or key.startswith("_"))
        self._names.add_holder(name, own)
        for hook in hooks_of_optimizer(optimizer):
            self.visit(f"{name}.hook", hook)

    def _visit_module(self, name: str, root: nn.Module) -> None:
        self.found.modules.append((name, root))
        for prefix, module in root.named_modules(prefix=name):
            self._seen[id(module)] = module
            for hook in hooks_of_module(module):
                self.visit(f"{prefix}.hook", hook)
            if type(module) not in _TORCH_MODULES:
                self._visit_class(prefix, type(module))
            for attribute, value in list(vars(module).items()):
                if attribute not in _PLAIN_MODULE_ATTRIBUTES and not isinstance(value, SCALARS):
                    self._aside.append((f"{prefix}.{attribute}", vars(module), attribute))


_CLOSED = (*SCALARS, types.BuiltinFunctionType, *GENERATORS, *WHOLE, IOBase, Iterator)
"""Kinds of objects that lead nowhere, or, as iterators, are refused where they are asked."""

_VISITED = ("torch.optim.lr_scheduler", "torch.distributions")
"""Modules of PyTorch's whose objects users look into; modules and optimizers apart."""

_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
"""Attributes of an optimizer; what only wraps one, as ``accelerate`` does, has properties of these names."""

_BUILT_IN = (list, tuple, set, frozenset, deque)

_FOR_SIZES = ("sympy", "mpmath")
"""Packages by which PyTorch calculates with sizes that have no value yet."""

_TORCH_MODULES = frozenset(value for value in vars(nn).values() if isinstance(value, type))


def _as_built_in(value: Any) -> Any:
    """What a list, tuple or the like of a user's class holds, whatever its own ``__len__`` and ``__iter__`` do."""
    base: Any = next((base for base in _BUILT_IN if isinstance(value, base)), None)
    if base is None or base is list:  # whose items are places
        return value
    return (*base.__iter__(value),) if base.__len__(value) <= MAX_ITEMS else ()


def is_optimizer(value: Any) -> bool:
    """Return whether it is an optimizer, and not what only wraps one."""
    return isinstance(value, Optimizer) and vars(value).keys() >= _OF_OPTIMIZERS


def is_unknown(value: Any, found: Found) -> bool:
    """Return whether it is an optimizer or a scaler that was not found."""
    if isinstance(value, GradScaler):
        return value.is_enabled() and not any(value is each for _, each in found.scalers)
    return is_optimizer(value) and not any(value is each for _, each in found.optimizers)


def lacks_cache(cache: Any, found: Found) -> bool:
    """Return whether it is a cache of a function of the user's or of a library of theirs that was not found."""
    function = without_cache(cache)
    is_theirs = isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename)
    is_theirs = is_theirs and _package_of(function) not in _FOR_SIZES
    return is_theirs and not any(cache is each for each in found.cached)


def is_own_method(kind: type, name: str) -> bool:
    """Whether ``kind`` has a method from others than PyTorch, in whose place an object of it may have a function."""
    base = next((base for base in kind.__mro__ if name in vars(base)), object)
    is_method = isinstance(vars(base).get(name), types.FunctionType | classmethod | staticmethod)
    return is_method and not name.startswith("__") and base.__module__.partition(".")[0] != "torch"


def _package_of(value: Any) -> str:
    """Of a class or function, or of an object's class."""
    module = getattr(value if isinstance(value, type | types.FunctionType) else type(value), "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


_files: WeakKeyDictionary[type, str] = WeakKeyDictionary()  # a class holds all of its module, which may be a user's


def file_of(kind: type) -> str:
    """Return where a class was written."""
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
