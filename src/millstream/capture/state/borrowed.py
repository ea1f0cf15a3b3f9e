"""What code that ran takes from PyTorch and from Python's library by its name: functions, classes and their methods.

Notebooks and libraries replace such things: ``F.gelu = fast_gelu``, ``nn.Linear.forward = f``. The search for what a
step uses does not go there (``discover.py``): it would find all of PyTorch.

**Contract**
- What stands at a name that the code of a step's own, of libraries and of those parts of PyTorch that models call says
  itself is found: variables of modules, attributes of modules and classes; also that there is nothing, where something
  put there would hide what is found elsewhere.
- Nothing is found that changes by itself, such as counters: of values that are not called only flags are, and those
  that the user's code names.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from millstream.capture.lines import is_called_by_models, is_millstreams, is_users
from millstream.capture.state.code import is_users_module, names_of
from millstream.capture.state.discover import file_of
from millstream.capture.state.location import MISSING, Location
from millstream.tree.spec import SCALARS

_BUILTINS = vars(builtins)

_CHANGEABLE = 1 << 9
"""The flag of classes that Python code has made: others take no attributes."""


def find_borrowed(
    frames: Iterable[tuple[CodeType, dict[str, Any]]],
    kinds: Iterable[type],
    modules: Iterable[ModuleType],
    handed_on: Iterable[ModuleType],
) -> dict[Location, Any]:
    """Find what code takes from PyTorch and Python's library: where it is, and what is there, or ``MISSING``.

    Args:
        frames: Code that ran, and its globals.
        kinds: Classes of objects whose methods it calls.
        modules: Modules of Python that it reaches otherwise than by the names of variables.
        handed_on: Those of which it computes the names of attributes.
    """
    frames = [*frames]
    search = _Search({id(code) for code, _ in frames})
    for code, variables in frames:
        if is_users(code.co_filename) or is_called_by_models(code.co_filename):
            search.read(code, variables)
    for kind in kinds:
        search.visit_class(kind)
    for module in modules:
        search.visit_module(module, search.users_names, is_users=True)
    for module in handed_on:
        search.visit_module(module, {*vars(module)}, is_users=True)
    search.finish()
    return search.found


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python functions that are called where this is, wrapped ones too."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while isinstance(value, FunctionType):
        yield value
        value = vars(value).get("__wrapped__")


def original_of(value: Any) -> Any:
    """What stands in a place where Millstream may have put a wrapper for a while; ``MISSING`` if that was nothing."""
    while isinstance(function := getattr(value, "__func__", value), FunctionType):
        if not is_millstreams(function.__code__.co_filename):
            break
        value = vars(function).get("__wrapped__", MISSING)
    return value


class _Search:
    def __init__(self, ran: set[int]) -> None:
        self._ran = ran
        self.found: dict[Location, Any] = {}
        self.names: set[str] = set()
        self.users_names: set[str] = set()
        self.told: set[str] = set()  # of attributes that users' code asks for
        self._kinds: dict[type, None] = {}

    def read(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Look at what some code names."""
        names, is_theirs = {*code.co_names}, is_users(code.co_filename)
        if is_theirs:
            names |= names_of(code).told
            self.told |= names_of(code).told
            self.users_names |= names
        self.names |= names
        for name in names:
            value = variables.get(name, _BUILTINS.get(name, MISSING))
            if value is MISSING:  # it may be imported while the code runs
                value = sys.modules.get(name)
            elif name not in variables:
                self._add(_BUILTINS, name, value)
            if not is_theirs and name in variables:
                self._add(variables, name, value)
            if isinstance(value, ModuleType):
                self.visit_module(value, names, is_users=is_theirs)
            elif isinstance(value, type) and is_theirs:
                self.visit_class(value)
        if not is_theirs:
            self._visit_class_of(code, variables)

    def visit_module(self, module: ModuleType, names: set[str], *, is_users: bool) -> None:
        """Look at attributes of a module of Python, and of modules that these are."""
        waiting, seen = [module], set[int]()
        while waiting:
            module = waiting.pop()
            if id(module) in seen or is_users_module(module) or module.__name__.startswith("millstream"):
                continue
            seen.add(id(module))
            held = vars(module)
            for name in names.intersection(held):
                value = held[name]
                if isinstance(value, ModuleType):
                    waiting.append(value)
                elif isinstance(value, type) and is_users:
                    self.visit_class(value)
                self._add(held, name, value, is_users=is_users)

    def visit_class(self, kind: type) -> None:
        """Look at attributes of a class and its bases, when all names are known."""
        self._kinds[kind] = None

    def finish(self) -> None:
        """All code was read."""
        for kind in [*self._kinds]:
            for base in filter(_is_borrowed, kind.__mro__):
                forward = vars(base).get("forward")  # which may be replaced by what tracing sees into
                if isinstance(forward, FunctionType) and is_called_by_models(forward.__code__.co_filename):
                    self.read(forward.__code__, forward.__globals__)
        for kind in self._kinds:
            self._look_at_class(kind)

    def _look_at_class(self, kind: type) -> None:
        wanted = {name for base in kind.__mro__ for name, value in vars(base).items() if self._is_used(name, value)}
        if issubclass(kind, Tensor | nn.Module):
            wanted |= self.told
        if kind is Tensor:  # operators
            wanted |= {name for base in kind.__mro__[:-1] for name in vars(base) if name.startswith("__")}
        for base in kind.__mro__:
            if _is_borrowed(base):
                held = next(each for each in gc.get_referents(vars(base)) if type(each) is dict)
                for name in wanted:
                    is_users = name in self.users_names
                    self._add(held, name, held.get(name, MISSING), prefix=f"{base.__qualname__}.", is_users=is_users)
            wanted.difference_update(vars(base))

    def _is_used(self, name: str, value: Any) -> bool:
        """Whether code reads the attribute of a class, or syntax has called it."""
        return name in self.names or any(id(function.__code__) in self._ran for function in functions_in(value))

    def _visit_class_of(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Look at the class of a method."""
        first, *path = code.co_qualname.split(".")
        kind = variables.get(first)
        for name in path:
            if isinstance(kind, type):
                self.visit_class(kind)
                kind = vars(kind).get(name)

    def _add(self, holder: dict[str, Any], name: str, value: Any, *, prefix: str = "", is_users: bool = False) -> None:
        value = original_of(value)
        if value is MISSING or _is_code(value) or (is_users and isinstance(value, SCALARS)):
            prefix = prefix or (f"{where}." if (where := holder.get("__name__")) else "")
            self.found[Location(holder, name, f"{prefix}{name}")] = value


def _is_borrowed(kind: type) -> bool:
    return bool(kind.__flags__ & _CHANGEABLE) and not is_users(file_of(kind))


def _is_code(value: Any) -> bool:
    """Whether it is called, has attributes that are, or says in which way code goes."""
    return callable(value) or isinstance(value, (ModuleType, bool)) or hasattr(type(value), "__get__")
