"""Select the user's part of a record: the rest is PyTorch's and Python's own to change.

**Contract**
- What ``docs/limits.md`` says cannot be seen does not count; nor does what code of Python's and PyTorch's reads of its
  own modules, functions and classes.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections import ChainMap, UserDict, UserList, deque
from contextvars import ContextVar
from functools import partial
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

from torch import nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream._torch.autograd.hooks import HOOKS_FOR_ALL
from millstream.capture.lines import is_users
from millstream.capture.record.paths import is_namespace
from millstream.capture.record.reads import IS_HEAP_TYPE, MISSING, WHOLE, Kind, Read, is_a
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.code import is_users_module
from millstream.tree.spec import SCALARS


def counts(read: Read, record: Recorder) -> bool:
    """Return whether what was read is the user's, or may be another in the next call for other reasons."""
    return not (_is_of_library(read, record) or _is_documented(read))


def _is_of_library(read: Read, record: Recorder) -> bool:
    """Return whether what was read is code, a class or a variable of Python's or PyTorch's, or theirs alone to use."""
    holder, kind, owner = read.holder, read.kind, read.owner
    key = read.key if is_a(read.key, str) else ""  # others may be compared by code of the user's
    if kind is Kind.CLASS:
        return is_fixed(holder) or key in ("__dataclass_fields__", "__match_args__")
    if kind is Kind.CODE:
        return not is_users(holder.__code__.co_filename)
    if kind is Kind.TYPE and is_fixed(holder if is_a(holder, type) else type(holder)):
        return True
    if is_a(owner, ModuleType):
        return is_library(owner.__name__)
    if is_namespace(holder):
        return is_library(holder["__name__"])
    if is_users(read.code.co_filename):
        return False
    return _is_read_for_library(read, key, record)


def _is_read_for_library(read: Read, key: str, record: Recorder) -> bool:
    """The same of what code of Python's or PyTorch's has read."""
    holder, owner = read.holder, read.owner
    if any(holder is hooks for hooks in HOOKS_FOR_ALL):  # which ``Guards`` compares
        return True
    if is_a(owner, nn.Module) and key.startswith("_"):  # such as whether DDP is within ``Join``
        return not is_a(read.value, (*SCALARS, tuple))
    if is_a(owner, nn.Module | Optimizer):
        return key.startswith("_") or (is_a(owner, Optimizer) and key in _OF_OPTIMIZERS)
    if key in _STATE:
        return True
    origin = record.origin_of(holder)
    origin_key = origin.key if origin is not None and is_a(origin.key, str) else ""
    if origin is not None and origin_key == "_modules" and not holder:  # a layer without submodules
        return is_library(type(origin.owner).__module__)
    if is_a(holder, list | dict | set | deque) and origin is not None and origin.holder is not holder:
        return origin_key not in _STATE and _is_of_library(origin, record)
    if read.kind is Kind.CELL or not is_library(type(owner).__module__):
        return read.kind is Kind.CELL
    if read.value is MISSING or not _is_looked_into(owner):
        return True
    if is_a(owner, (LRScheduler, type(os.environ))):  # wherever it was read first
        return False
    if (made := record.origin_of(owner)) is None:
        return True
    return not is_users(made.code.co_filename) if made.holder is owner else _is_of_library(made, record)


def _is_documented(read: Read) -> bool:
    """Return whether ``docs/limits.md`` says that nobody looks there."""
    value, key, owner = read.value, read.key, read.owner
    made_by = read.code.co_qualname.partition(".")[0]
    if made_by == "__create_fn__" and (read.kind is Kind.CELL or read.code.co_name == made_by):  # of data classes
        return True
    if read.kind is Kind.TYPE or (is_a(value, ModuleType) and is_users_module(value)):
        return False
    is_theirs = is_users(read.code.co_filename)
    if is_a(value, _NEVER_REPLACED) or (is_a(value, type) and is_library(value.__module__)):
        return read.kind is Kind.CLASS or not is_theirs
    if value is not MISSING or not is_a(key, str):
        return False
    if is_a(read.holder, dict) and "__builtins__" in read.holder:
        return hasattr(builtins, key) and not is_theirs
    if is_a(owner, nn.Module) and any(key in vars(owner)[each] for each in _STATE):
        return True
    kinds = (kind for kind in type(owner).__mro__ if key in vars(kind))
    is_pytorchs = next(kinds, object).__module__.startswith("torch.")  # a method, say
    return is_pytorchs and key != "forward" and not is_theirs


_NEVER_REPLACED = (
    ModuleType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
"""What variables and classes hold that is not looked at in every call."""
_STATE = ("_parameters", "_buffers", "_modules")
"""Attributes of modules that hold what is the user's."""
_OF_OPTIMIZERS = ("defaults", "grad_scale", "found_inf")
"""Attributes that an optimizer's own code reads: the groups' values count, and a scaler's."""
_LOOKED_INTO = (nn.Module, Optimizer, LRScheduler, Distribution, list, dict, set, deque, *WHOLE)
_LOOKED_INTO += (type(os.environ), SimpleNamespace, UserDict, UserList, ChainMap, partial, ContextVar)
"""Classes of libraries whose objects hold what is the user's."""
_OF_PYTHON = frozenset(
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


def _is_looked_into(owner: Any) -> bool:
    """Return whether code of libraries reads what is the user's in an object of theirs."""
    kinds = type(owner).__mro__
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return is_a(owner, _LOOKED_INTO) or not _OF_PYTHON.isdisjoint(names)


def is_fixed(kind: type) -> bool:
    """Return whether a class cannot change, or is none of the user's."""
    return not kind.__flags__ & IS_HEAP_TYPE or is_library(kind.__module__)


def is_library(module: str) -> bool:
    """Return whether a module is Python's, PyTorch's or ours."""
    root = str(module).partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "millstream", "pybind11_builtins")
