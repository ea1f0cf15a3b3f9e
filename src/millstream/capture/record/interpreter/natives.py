"""Reads and writes of functions in C: nobody sees these from the outside.

One that is not known counts as reading all that it is given; so does the object that it is a
method of.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from torch import Tensor

from millstream.capture.record.reads import (
    CONTAINERS,
    MISSING,
    Found,
    Kind,
    find_attribute,
    find_contents,
    find_in_class,
    find_in_context,
    find_item,
    find_length,
    find_own,
    is_a,
    own_dict,
)

_COPYING = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})
"""Names of methods by which copies are made."""

GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
"""Classes of functions in C that read what they are made for."""

DEPTH = 1000
"""To which functions that are not known are taken to read: Python lets those in C go no deeper."""

NATIVE = (
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
    ClassMethodDescriptorType,
)

_NOTHING = frozenset(
    {id, callable, type, next, print, globals, locals, super, object, property, staticmethod, classmethod}
    | {
        object.__new__,
        object.__init__,
        type.__new__,
        input,
        open,
        range,
        slice,
    }
)
_OF_TYPE = frozenset({isinstance, issubclass})


def asks_iterators(function: Any) -> bool:
    """Return whether a function in C may ask an iterator that it is given for items."""
    plain = _plain(function)
    is_harmless = plain is iter or any(plain in each for each in (_NOTHING, _OF_TYPE, _BY_NAME, _STORE))
    return plain is next or not is_harmless


_BY_NAME = frozenset({getattr, hasattr, object.__getattribute__, type.__getattribute__})
_STORE = frozenset({setattr, object.__setattr__, type.__setattr__})
_REMOVE = frozenset({delattr, object.__delattr__, type.__delattr__})
_SHALLOW = frozenset(
    {iter, list, tuple, set, frozenset, dict, enumerate, zip, map, filter, reversed, any, all, sum, min, max, sorted}
    | {deque, OrderedDict, defaultdict, math.fsum, math.prod, functools.reduce}
)

SPECIAL: dict[Any, tuple[str, ...]] = {
    bool: ("__bool__", "__len__"),
    str: ("__str__", "__repr__"),
    repr: ("__repr__",),
    format: ("__format__", "__str__", "__repr__"),
    int: ("__int__", "__index__"),
    float: ("__float__", "__index__"),
    complex: ("__complex__", "__float__"),
    abs: ("__abs__",),
    round: ("__round__",),
    hash: ("__hash__",),
    iter: ("__iter__", "__getitem__"),
    next: ("__next__",),
    reversed: ("__reversed__", "__len__", "__getitem__"),
    dir: ("__dir__",),
    callable: ("__call__",),
    **dict.fromkeys((list, tuple, set, frozenset, enumerate, sorted, sum, min, max, any, all, dict), ("__iter__",)),
}
"""Methods of what they are given that they call, and look up in its class."""


def special_of(function: Any) -> tuple[str, ...]:
    """The same for any function in C."""
    return SPECIAL.get(_plain(function), ())


ITEM, STORE_ITEM, LENGTH, NOTHING, FILL, WHOLE = "item", "store_item", "length", "nothing", "fill", "whole"
_METHODS = {
    **dict.fromkeys("get __getitem__ __contains__".split(), ITEM),
    **dict.fromkeys("__setitem__ __delitem__ setdefault pop".split(), STORE_ITEM),
    "__len__": LENGTH,
    **dict.fromkeys("keys values items __iter__ __init__ __new__".split(), NOTHING),
    **dict.fromkeys(
        """
        append appendleft extend extendleft insert remove popleft popitem clear sort reverse rotate update add discard
        difference_update intersection_update symmetric_difference_update move_to_end __ior__ __iadd__
        """.split(),
        FILL,
    ),
}
"""Methods of containers in C, by what they do to their container; any other reads all of it."""


def find_reads(function: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    """Yield what a function in C reads of its arguments.

    Args:
        function: It.
        arguments: By position and by name; of a method the object comes first.
    """
    plain = _plain(function)
    if plain in _NOTHING or not arguments or getattr(function, "__module__", "") == "_abc":
        return
    first, name = arguments[0], getattr(function, "__name__", "")
    if plain in _STORE or plain in _REMOVE:
        return
    if plain in _OF_TYPE:
        yield first, Kind.TYPE, None, type(first), first
    elif plain in _BY_NAME and len(arguments) > 1 and is_a(arguments[1], str):
        yield from find_attribute(first, arguments[1])
    elif plain in _OF_FIRST:
        yield from _OF_FIRST[plain](first)
    elif is_a(first, ContextVar):
        yield from find_in_context(first) if name == "get" else ()
    elif name in _COPYING and not is_a(first, CONTAINERS):
        yield from find_own(first)
    elif plain is operator.getitem:
        yield from find_item(first, arguments[1])
    elif is_a(first, CONTAINERS) and _is_method(function):
        yield from _find_of_method(_METHODS.get(name, WHOLE), first, arguments[1:])
    else:
        yield from _find_in_all(plain, arguments)


_OF_FIRST: dict[Any, Callable[[Any], Iterator[Found]]] = {vars: find_own, dir: find_own, len: find_length}
"""Functions by what they read of their only argument."""


def _find_in_all(plain: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    """Yield what a function reads that may go through all that it is given."""
    for argument in arguments:
        yield from find_contents(argument, 1 if plain in _SHALLOW else DEPTH)
    if plain is functools.reduce and len(arguments) > 2:
        yield from _find_on_path(*arguments[:3])
    for getter in (each for each in arguments if plain in _SHALLOW and is_a(each, GETTERS)):
        for items in (each for each in arguments if is_a(each, list | tuple | set | frozenset | deque)):
            for item in items:
                yield from find_got(getter, (item,))


def _find_on_path(step: Any, keys: Any, holder: Any) -> Iterator[Found]:
    """Yield what ``functools.reduce`` reads that goes from an object to one of its attributes or items, and so on."""
    find = find_attribute if step is getattr else find_item if step is operator.getitem else None
    if find is None or not is_a(keys, list | tuple):
        return
    for key in keys:
        found = [*find(holder, key)]
        yield from found
        holder = _value_in(found, key)


def _value_in(found: list[Found], key: Any) -> Any:
    """Return what is found in the end."""
    places = (Kind.ITEM, Kind.SLOT, Kind.CLASS)
    values = [each[3] for each in found if each[1] in places and each[2] == key and each[3] is not MISSING]
    return values[-1] if values else None


def _find_of_method(kind: str, container: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    if kind in (ITEM, STORE_ITEM) and arguments and is_a(container, dict | list):
        yield from find_item(container, arguments[0])
    elif kind == LENGTH:
        yield from find_length(container)
    elif kind in (WHOLE, ITEM, STORE_ITEM):
        yield from find_contents(container)
    if kind in (FILL, WHOLE):
        for argument in arguments:
            yield from find_contents(argument)


def find_writes(function: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    """Yield what a function in C writes, with what is there before; arguments as in ``find_reads``."""
    plain = _plain(function)
    if plain in _STORE or plain in _REMOVE:
        yield from find_stored(arguments[0], arguments[1])
    elif arguments and is_a(arguments[0], CONTAINERS) and _is_method(function):
        kind = _METHODS.get(function.__name__)
        if kind == STORE_ITEM and len(arguments) > 1:
            yield from find_item(arguments[0], arguments[1])
        elif kind in (FILL, STORE_ITEM):
            yield from find_contents(arguments[0])
    elif is_a(arguments[0] if arguments else None, ContextVar):
        if function.__name__ in ("set", "reset"):
            yield from find_in_context(arguments[0])
    elif plain in (operator.setitem, operator.delitem):
        yield from find_item(arguments[0], arguments[1])
    elif arguments and getattr(plain, "__name__", "") in _FILLING:
        yield from find_contents(arguments[0])


_FILLING = frozenset(
    """
    heappush heappop heapify heapreplace heappushpop insort insort_left insort_right
    iadd iconcat ior iand isub ixor imul
    """.split()
)
"""Names of functions in C that change the container that they are given first."""


_KNOWN_MODULES = frozenset({"builtins", "math", "_operator", "itertools", "_abc", "time", "_functools", "_thread"})
"""Of functions in C of which all is known that they change."""
_PASSING_ON = (functools.partial, functools._lru_cache_wrapper)
"""Classes of objects in C that change nothing themselves of what they are given."""


def find_exposed(function: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    """Yield what a function in C may change of what it is given, where nobody knows; arguments as in ``find_reads``."""
    module = getattr(function, "__module__", None) or getattr(getattr(function, "__objclass__", None), "__module__", "")
    is_known = module in _KNOWN_MODULES or str(module).startswith("torch") or is_a(function, _PASSING_ON)
    if is_known or not arguments or (_is_method(function) and is_a(arguments[0], CONTAINERS)):
        return
    for argument in arguments:
        if is_a(argument, CONTAINERS):
            yield from (each for each in find_contents(argument, DEPTH) if not is_a(each[0], tuple | frozenset))
        elif (held := own_dict(argument)) is not None and not is_a(argument, (Tensor, ModuleType)):
            yield held, Kind.CONTENTS, None, (*dict.keys(held), *dict.values(held)), argument


def find_stored(owner: Any, name: str) -> Iterator[Found]:
    """Yield where an attribute is put if no method of the user's does it, and what is there before."""
    found = [*find_attribute(owner, name)]
    places = (Kind.CLASS,) if is_a(owner, type) else (Kind.ITEM, Kind.SLOT)
    yield from (each for each in found if each[1] in places and each[4] is owner)


def owner_of(function: Any) -> Any:
    """The object whose method a bound function in C is; a module's functions have none."""
    owner = getattr(function, "__self__", None) if is_a(function, BuiltinFunctionType | MethodWrapperType) else None
    return None if owner is None or type(owner) is type(builtins) else owner


def _is_method(function: Any) -> bool:
    return is_a(function, MethodDescriptorType | WrapperDescriptorType) or owner_of(function) is not None


def _plain(function: Any) -> Any:
    """The same function whether it is bound or not, as far as the table knows it; ``None`` for what has no hash."""
    if is_a(function, MethodWrapperType):
        return getattr(function.__objclass__, function.__name__, None)
    try:
        hash(function)
    except TypeError:
        return None
    return function


def find_of_callable(function: Any) -> Iterator[Found]:
    """Yield what calling an object in C reads of itself: a partial's parts, the names that a getter has."""
    if is_a(function, functools._lru_cache_wrapper):
        yield function, Kind.CONTENTS, None, (), function
    elif is_a(function, functools.partial):
        yield from ((*found[:4], function) for found in find_contents(function.keywords))
    elif not is_a(function, type):
        yield from find_in_class(type(function), "__call__")[0]


def find_got(getter: Any, arguments: tuple[Any, ...]) -> Iterator[Found]:
    """Yield what an ``attrgetter``, ``itemgetter`` or ``methodcaller`` reads."""
    if not arguments:
        return
    _, keys = getter.__reduce__()[:2]
    if is_a(getter, operator.itemgetter):
        for key in keys:
            yield from find_item(arguments[0], key)
        return
    for path in keys[:1] if is_a(getter, operator.methodcaller) else keys:
        holder = arguments[0]
        for name in path.split("."):
            found = [*find_attribute(holder, name)]
            yield from found
            holder = _value_in(found, name)
