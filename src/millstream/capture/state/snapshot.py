"""The Python side of a step: what it changes, and how to put everything back.

Tracing runs the user's function once on tensors without values. Whatever it writes into Python objects meanwhile must
not stay, and what it would have changed in every call must be found, because a replayed graph changes tensors only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from types import CellType, FunctionType
from typing import Any

from millstream._torch.tensors import FakeTensor
from millstream.capture.state.contents import content_of, has_content, is_container, put_back
from millstream.capture.state.discover import Found
from millstream.capture.state.location import MISSING, Attributes, Location
from millstream.capture.state.signature import is_same


class Kind(Enum):
    """What a holder belongs to."""

    PLAIN = "an object of the user's"
    MODULE = "a module"
    OPTIMIZER = "an optimizer's own attributes"
    GROUP = "hyperparameters"
    STATE = "optimizer state"
    SCALER = "a gradient scaler"


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that the traced function changed."""

    kind: Kind  # what the holder belongs to
    location: Location  # the entry; or a whole container, where its length or order changed
    before: Any  # what was there, or ``MISSING``
    after: Any  # what is there now, or ``MISSING``

    @property
    def is_entry(self) -> bool:
        """Whether one entry changed, rather than the length or order of a container."""
        return isinstance(self.location.holder, CellType) or self.location.key is not None


class Snapshot:
    """The content of every holder that a step reaches, to compare with and to go back to.

    Args:
        found: What the step reaches.
    """

    def __init__(self, found: Found) -> None:
        self._copies: dict[int, tuple[Kind, str, Any, Any]] = {}
        self._links: dict[Location, Any] = {}
        self._long: dict[int, tuple[str, Any, list[Any]]] = {}
        self.add(found)

    def add(self, found: Found) -> None:
        """Note what else a step reaches, as it is now."""
        optimizers = {id(vars(optimizer)) for _, optimizer in found.optimizers}  # whose attributes are kept below
        for link in found.links:
            if id(link.location.holder) not in optimizers:
                self._links.setdefault(link.location, link.location.get())
        for name, root in found.modules:
            for path, module in root.named_modules():
                prefix = f"{name}.{path}" if path else name
                for holder in (vars(module), module._parameters, module._buffers, module._modules):
                    self._keep(Kind.MODULE, prefix, holder)
        for name, optimizer in found.optimizers:
            self._keep(Kind.OPTIMIZER, name, vars(optimizer))
            self._keep(Kind.GROUP, f"{name}.param_groups", optimizer.param_groups)
            for number, group in enumerate(optimizer.param_groups):
                self._keep(Kind.GROUP, f"{name}.param_groups[{number}]", group)
                self._keep(Kind.GROUP, f"{name}.param_groups[{number}]", group["params"])
            for entry in (optimizer.state, *optimizer.state.values()):
                self._keep(Kind.STATE, f"{name}.state", entry)
        for name, scaler in found.scalers:
            for part in (vars(scaler), scaler._per_optimizer_states, *scaler._per_optimizer_states.values()):
                self._keep(Kind.SCALER, name, part)
        for name, container in (*found.objects, *found.containers):
            self._keep(Kind.PLAIN, name, container)
        self._long = {id(each): (name, each, _first_of(each)) for name, each in found.long} | self._long

    def _keep(self, kind: Kind, name: str, holder: Any) -> None:
        if is_container(holder) and id(holder) not in self._copies:
            self._copies[id(holder)] = (kind, name, holder, content_of(holder))

    def changes(self) -> list[Change]:
        """Everything that differs now, but for what caches keep by the type of a traced tensor."""
        found: dict[Location, Change] = {}
        for location, before in self._links.items():
            after = location.get()
            if _is_changed(after, before):
                found[location] = Change(Kind.PLAIN, location, before, after)
        for kind, name, holder, copy in self._copies.values():
            if isinstance(holder, dict | Attributes):
                for key in [*copy, *(key for key in holder if key not in copy)]:
                    before, after = copy.get(key, MISSING), holder.get(key, MISSING)
                    if _is_changed(after, before) and (not is_type_of_tracing(key) or _is_traced(after)):
                        location = Location(holder, key, f"{name}.{key}" if isinstance(key, str) else name)
                        found.setdefault(location, Change(kind, location, before, after))
            elif isinstance(holder, list) and len(holder) == len(copy):
                for index in (index for index, value in enumerate(copy) if _is_changed(holder[index], value)):
                    location = Location(holder, index, f"{name}[{index}]")
                    found.setdefault(location, Change(kind, location, copy[index], holder[index]))
            elif {*copy} != holder if isinstance(holder, set) else not has_content(holder, copy):
                location = Location(holder, None, name)
                found[location] = Change(kind, location, copy, holder)
        for name, holder, first in self._long.values():
            if _made_by_tracing(holder):
                location = Location(holder, None, name)
                found[location] = Change(Kind.PLAIN, location, first, holder)
        return list(found.values())

    def restore(self) -> None:
        """Put everything back."""
        for location, before in self._links.items():
            if location.get() is not before:
                location.set(before)
        for _, _, holder, copy in self._copies.values():
            put_back(holder, copy)
        _take_out(self._long.values())


def _first_of(container: Any) -> list[Any]:
    """What a deque with a greatest length loses when something is put behind."""
    return [*container] if isinstance(container, deque) and container.maxlen is not None else []


def _made_by_tracing(container: Any) -> list[Any]:
    """Keys, indices or elements at which a long container holds tensors that only tracing can have put there.

    Whatever else is new in a replay buffer or a history, another thread may have put there meanwhile.
    """
    if isinstance(container, dict):
        return [key for key, value in [*container.items()] if _is_traced(value)]
    if isinstance(container, set):
        return [value for value in [*container] if _is_traced(value)]
    return [index for index, value in enumerate([*container]) if _is_traced(value)]


def _is_traced(value: Any) -> bool:
    if type(value) in (tuple, list, dict):
        return any(map(_is_traced, value.values() if type(value) is dict else value))
    return isinstance(value, FakeTensor)


def is_type_of_tracing(key: Any) -> bool:
    """Whether it is a type that tensors have while they are traced only, or a weak reference to one."""
    key = key() if isinstance(key, weakref.ref) else key
    return isinstance(key, type) and issubclass(key, FakeTensor)


def _take_out(containers: Iterable[tuple[str, Any, list[Any]]]) -> None:
    """Remove what tracing has put into long containers, and put back what it has pushed out of a deque."""
    for _, container, first in containers:
        number = len(made := _made_by_tracing(container))
        for place in reversed(made):
            if isinstance(container, set):
                container.discard(place)
            else:
                del container[place]
        if number and number < len(first) and container and container[0] is first[number]:
            container.extendleft(reversed(first[:number]))


def _is_changed(after: Any, before: Any) -> bool:
    # While tracing, FX puts wrappers in the place of functions marked by torch.fx.wrap; so do our own patches.
    is_wrapper = type(after) is FunctionType and vars(after).get("__wrapped__", after) is before
    return not is_wrapper and not is_same(after, before)
