"""Objects that are batches: of classes written in Python, with tensors in their attributes or slots.

A trainer that is passed to a step is an object with tensors, too. It is the same one in each call, and what the step
does to it is to stay. So an object is a batch where another one of its class comes in its place
(``capture.step.calls``), and where nothing in it is a model, an optimizer or a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream.tree.containers import blank, is_open_container, parts_of
from millstream.tree.spec import SCALARS

MOST_PARTS = 10_000
"""Of an object that is looked into: what has more is no batch."""

_NO_BATCH = (nn.Module, nn.Parameter, Optimizer, LRScheduler)
_CLOSED = (type, ModuleType, FunctionType, Tensor, Iterator, *SCALARS)


_classes: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_written_in_python(kind: type) -> bool:
    """Return whether objects of a class are what their attributes and slots hold, and can be made of these."""
    known = _classes.get(kind)
    if known is None:
        known = not issubclass(kind, (*_NO_BATCH, *_CLOSED)) and not hasattr(kind, "__del__")
        if known:
            try:
                blank(kind)
            except TypeError:
                known = False
        _classes[kind] = known
    return known


def objects_of_batch(value: Any) -> list[Any]:
    """The objects in a batch that are to be taken apart, itself among them; none where it is no batch."""
    waiting, seen, objects, has_tensor = [value], dict[int, Any](), list[Any](), False
    while waiting:
        part = waiting.pop()
        if isinstance(part, _NO_BATCH) or len(seen) > MOST_PARTS:
            return []
        has_tensor = has_tensor or isinstance(part, Tensor)
        if id(part) in seen or isinstance(part, _CLOSED):
            continue
        seen[id(part)] = part
        is_object = not is_open_container(part) and is_written_in_python(type(part))
        if is_object:
            objects.append(part)
        if is_object or is_open_container(part):
            waiting += parts_of(part)
    return objects if has_tensor else []
