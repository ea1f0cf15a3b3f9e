"""What a captured graph took for granted, checked before every replay.

Each check looks at entries of dictionaries that were found once, where walking ``named_parameters()`` would cost a
microsecond for each tensor. With hundreds of tensors on a device even that is too slow, and compiled code does it
(``QuickGuards``): when it is content, so is ``hold``; when it is not, Python looks.

**Contract**
- ``hold`` is content only when a new capture would record the same graph over the same tensors.
- Tensors are compared by identity, never by value.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, contains, getitem, is_
from types import CellType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream._torch.data_parallel import NUM_WRAPPED, data_parallel_wrappers
from millstream._torch.hooks import HOOKS_FOR_ALL, has_tensor_hooks, hooks_for_all, next_hook
from millstream._torch.tensors import layout_check
from millstream.capture.guards.native import QuickGuards, load_library
from millstream.capture.state.attributes import Attributes, Items, is_buffer
from millstream.capture.state.location import MISSING, Location
from millstream.capture.state.signature import SCALARS, is_same
from millstream.capture.state.snapshot import content_of, has_content, size_of
from millstream.capture.trace.patches.optimizers import is_number
from millstream.capture.trace.patches.scaler import is_idle


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that no longer holds.

    Attributes:
        reason: In a sentence.
        location: What changed, if that is an entry.
        is_final: Whether it will not hold again: state was replaced.
        is_tensor: Whether the entry held a tensor.
    """

    reason: str
    location: Location | None = None
    is_final: bool = False
    is_tensor: bool = False


def _wrapped() -> set[int]:
    return {id(parameter) for wrapper in data_parallel_wrappers() for parameter in wrapper.parameters()}


@dataclass(slots=True)
class Entries:
    """Entries of dicts and lists, and what they held.

    Attributes:
        locations: The entries.
        holders: Their holders, for a loop without Python code.
        keys: Likewise.
        values: What was there.
    """

    locations: list[Location] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, location: Location, value: Any) -> None:
        """Append an entry."""
        self.locations.append(location)
        self.holders.append(_view_of(location.holder))
        self.keys.append(location.key)
        self.values.append(value)

    def triples(self) -> Iterator[tuple[Any, Any, Any]]:
        """Holders, keys and values."""
        return zip(self.holders, self.keys, self.values, strict=True)

    def compare(self, test: Callable[[Any, Any], bool]) -> bool:
        """Whether every entry passes the test: what is there now, and what was there. No loop in Python: 30 ns each."""
        return all(map(test, map(getitem, self.holders, self.keys), self.values))


@dataclass(slots=True)
class Guards:
    """Conditions under which a graph may be replayed.

    Attributes:
        plain: Entries with plain Python values, compared by value.
        objects: Other entries, compared by identity.
        absent: Entries that must not be there.
        cells: Closure cells and their contents.
        forms: Entries, and what their tensors must look like, if they must at all: ``form_of`` and what it gives.
        copies: Dicts of submodules or hooks, lists of groups or parameters, and copies of them.
        sized: Lists and dicts of the user's, whose entries are among the others.
        sizes: Their lengths.
        ordered: Dicts of the user's whose order may count.
        orders: Their keys.
        loose: Sets, deques, arrays and such, and what they hold.
        pins: Of objects, classes and functions what is not to change (their class, bases, code): what gives that part,
            those that have it, and the parts.
        watched: Tensors whose gradients count.
        gradients: The gradient that each of them must have.
        placed: Those, and all other state of the graph.
        required_grad: Whether they require a gradient.
        addresses: Where their data is: ``tensor.data = ...`` keeps the object.
        layouts: Whether their sizes and strides are as before, and ``required_grad``.
        hooked: Tensors, modules and optimizers whose hooks count.
        names: How to call a container, by its id.
        owned: Entries that hold state of the step.
        scalers: Gradient scalers, which must be between ``update`` and ``unscale_``.
        hook_clock: Changes with the hooks; as it was when they were last looked at.
        hook_state: Numbers of hooks of ``hooked``, and the hooks for all modules and optimizers.
        num_wrapped: How many data-parallel wrappers had been made when they were last looked at.
        wrapped: By id, parameters that belonged to such at the capture.
        quick: The same conditions, but for forms, scalers and hooks, in compiled code.
    """

    plain: Entries = field(default_factory=Entries)
    objects: Entries = field(default_factory=Entries)
    absent: Entries = field(default_factory=Entries)
    cells: list[tuple[Location, Any]] = field(default_factory=list)
    forms: list[tuple[Location, Callable[[Any], Any], Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ordered: list[Any] = field(default_factory=list)
    orders: list[list[Any]] = field(default_factory=list)
    loose: list[tuple[Any, Any]] = field(default_factory=list)
    pins: dict[Callable[[Any], Any], tuple[list[Any], list[Any]]] = field(default_factory=dict)
    watched: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    placed: list[Tensor] = field(default_factory=list)
    required_grad: list[bool] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    layouts: Callable[[], bool] = bool
    hooked: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    owned: set[Location] = field(default_factory=set)
    scalers: list[GradScaler] = field(default_factory=list)
    hook_clock: tuple[int, ...] = ()
    hook_state: list[Any] = field(default_factory=list)
    num_wrapped: int = field(default_factory=lambda: NUM_WRAPPED[0])
    wrapped: set[int] = field(default_factory=_wrapped)
    quick: QuickGuards | None = None

    # --- what is expected ---------------------------------------------------------------------------------------------

    def expect(self, location: Location, value: Any) -> None:
        """Expect a place to hold ``value``, which may be ``MISSING``: plain values by value, others by identity."""
        if isinstance(location.holder, CellType):
            self.cells.append((location, value))
        elif value is MISSING:
            self.absent.add(location, value)
        else:
            (self.plain if isinstance(value, SCALARS) else self.objects).add(location, value)

    def expect_same(self, location: Location, value: Any) -> None:
        """Expect a place to hold the very object ``value``, which is state of the step."""
        self.objects.add(location, value)
        self.owned.add(location)

    def expect_form(self, location: Location, form_of: Callable[[Any], Any]) -> None:
        """Expect that what a place holds looks as it does now, though it may be another."""
        self.forms.append((location, form_of, form_of(location.get())))

    def measure(self, name: str, container: Any, *, is_ordered: bool = False) -> None:
        """Expect ``container`` to keep its length, or its keys in their order.

        And a set, a deque or an array, whose items are no entries, all that it holds.
        """
        self.names[id(container)] = name
        if isinstance(container, list | dict | Items | Attributes):
            if is_ordered and isinstance(container, OrderedDict | Items):  # which keep their order elsewhere
                self.loose.append((container, content_of(container)))
            elif is_ordered and isinstance(container, dict) and len(container) > 1:
                self.ordered.append(container)
                self.orders.append([*container])
            else:
                self.sized.append(_view_of(container))
                self.sizes.append(len(container))
        else:
            self.loose.append((container, content_of(container)))

    def keep(self, container: Any, name: str) -> None:
        """Expect a long container, whose items are no entries, to hold what it holds, or at least as many items."""
        is_array = isinstance(container, np.ndarray) or is_buffer(container)
        self.names[id(container)] = name
        if (is_array and size_of(container) <= MAX_BYTES) or (not is_array and len(container) <= MAX_COMPARED):
            self.loose.append((container, content_of(container)))
        else:
            self.sized.append(container)
            self.sizes.append(len(container))

    def pin(self, owner: Any) -> None:
        """Expect an object to keep its class, a class its bases, and a function its code and defaults."""
        for part in _FUNCTION if isinstance(owner, FunctionType) else _CLASS if isinstance(owner, type) else _OBJECT:
            owners, values = self.pins.setdefault(part, ([], []))
            owners.append(owner)
            values.append(part(owner))

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Expect ``tensors`` to stay where they are."""
        self.placed += tensors
        self.required_grad += (tensor.requires_grad for tensor in tensors)
        self.addresses += map(Tensor.data_ptr, tensors)
        self.layouts = layout_check(self.placed)

    def note_hooks(self) -> None:
        """Remember which hooks there are now."""
        self.hook_clock = _hooks_clock()
        self.hook_state = self._hooks()

    def quicken(self, written: Sequence[Tensor]) -> None:
        """From now on let compiled code look first, where it can be had; it also counts up versions of ``written``."""
        library = load_library()
        if library is None:
            return
        entries = [*self.plain.triples(), *self.objects.triples(), *self.absent.triples()]
        entries += ((location.holder, None, value) for location, value in self.cells)
        for container, copy in self.copies:
            entries += ((container, key, copy[key]) for key in _keys(copy))
        containers = [*(container for container, _ in self.copies), *self.sized]
        gradient_of = dict(zip(map(id, self.watched), self.gradients, strict=True))
        gradients = [gradient_of.get(id(tensor)) for tensor in self.placed]
        with contextlib.suppress(ValueError):
            pins = [(owner, _PARTS.index(part), value) for owner, part, value in self._pinned()]
            orders = [*zip(self.ordered, self.orders, strict=True)]
            self.quick = QuickGuards(library, entries, containers, orders, pins, self.placed, gradients, written)

    # --- whether it holds ---------------------------------------------------------------------------------------------

    def hold(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Compare with the state at capture.

        Returns:
            ``None`` if anything differs. Otherwise the tensors whose gradient is not where it must be, and where that
            is.
        """
        if self.hook_clock != (clock := _hooks_clock()):
            if self.hook_state != self._hooks():
                return None
            self.hook_clock = clock
        if self.num_wrapped != NUM_WRAPPED[0]:
            if self._is_wrapped():
                return None
            self.num_wrapped = NUM_WRAPPED[0]
        if self.scalers and not all(map(is_idle, self.scalers)):
            return None
        if self.forms and not all(form_of(location.get()) == form for location, form_of, form in self.forms):
            return None
        if self.loose and not all(has_content(container, content) for container, content in self.loose):
            return None
        if self.quick is not None and self.quick.hold():
            return []
        if not self._entries_hold():
            return None
        if [*map(Tensor.data_ptr, self.placed)] != self.addresses or not self.layouts():
            return None
        gradients = [*map(_GRADIENT, self.watched)]
        if all(map(is_, gradients, self.gradients)):
            return []
        return [
            (tensor, expected)
            for tensor, now, expected in zip(self.watched, gradients, self.gradients, strict=True)
            if now is not expected
        ]

    def _plain_are_equal(self) -> bool:
        """Whether plain values are equal; if so, the objects there now are those that the next call compares with."""
        if not self.plain.compare(is_same):
            return False
        self.plain.values = [*map(getitem, self.plain.holders, self.plain.keys)]
        return True

    def _is_wrapped(self) -> bool:
        return not (_wrapped() - self.wrapped).isdisjoint(map(id, self.placed))

    def _entries_hold(self) -> bool:
        try:
            return (
                [*map(len, self.sized)] == self.sizes  # first: to ask an optimizer's state for what is gone makes it
                and (not self.ordered or [*map(list, self.ordered)] == self.orders)
                and all(all(map(is_, map(part, owners), values)) for part, (owners, values) in self.pins.items())
                and self.objects.compare(is_)
                and (self.plain.compare(is_) or self._plain_are_equal())
                and not any(map(contains, self.absent.holders, self.absent.keys))
                and all(
                    (now := location.holder.cell_contents) is value or is_same(now, value)
                    for location, value in self.cells
                )
                and all(_is_unchanged(container, copy) for container, copy in self.copies)
            )
        except (KeyError, IndexError, ValueError, RuntimeError):
            return False

    # --- why it doesn't -----------------------------------------------------------------------------------------------

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        for entries in (self.plain, self.objects, self.absent):
            for location, value in zip(entries.locations, entries.values, strict=True):
                if not is_same(location.get(), value):
                    return self._another(location, value)
        for location, value in self.cells:
            if not is_same(location.get(), value):
                return self._another(location, value)
        if self.num_wrapped != NUM_WRAPPED[0] and self._is_wrapped():
            return Break("A parameter belongs to a data-parallel model now.", is_final=True)
        change = self._changed_container() or self._changed_object() or self._changed_tensor()
        if change is not None:
            return change
        if not all(map(is_idle, self.scalers)):
            return Break("Gradients were unscaled outside of the step.")
        return Break("A hook was registered or removed.") if self.hook_state != self._hooks() else None

    def changed_numbers(self) -> Iterator[Location]:
        """Places of plain numbers that hold other numbers now."""
        entries = zip(self.plain.locations, self.plain.values, strict=True)
        for location, value in (*entries, *self.cells):
            now = location.get()
            if is_number(value) and is_number(now) and not is_same(now, value):
                yield location

    def _another(self, location: Location, value: Any) -> Break:
        return Break(f"{location} is another than before.", location, location in self.owned, isinstance(value, Tensor))

    def _changed_container(self) -> Break | None:
        changed = [each for each, size in zip(self.sized, self.sizes, strict=True) if len(each) != size]
        changed += (each for each, order in zip(self.ordered, self.orders, strict=True) if [*each] != order)
        changed += (container for container, content in self.loose if not has_content(container, content))
        for container in changed:
            return Break(f"{self.names.get(id(container), 'An object')} holds other items than before.")
        for container, copy in self.copies:
            if not _is_unchanged(container, copy):
                return Break("A submodule, hook, parameter group or parameter was replaced, added or removed.")
        return None

    def _changed_object(self) -> Break | None:
        for owner, part, value in self._pinned():
            if part(owner) is not value:
                name, what = getattr(owner, "__qualname__", type(owner).__name__), str(part).split("'")[1]
                return Break(f"{name} has another {what if part is not type else 'class'} than before.")
        return None

    def _pinned(self) -> Iterator[tuple[Any, Callable[[Any], Any], Any]]:
        for part, (owners, values) in self.pins.items():
            yield from ((owner, part, value) for owner, value in zip(owners, values, strict=True))

    def _changed_tensor(self) -> Break | None:
        for tensor, requires_grad, address in zip(self.placed, self.required_grad, self.addresses, strict=True):
            if tensor.data_ptr() != address:
                return Break("A parameter or other state was moved or converted.", is_final=True)
            if tensor.requires_grad is not requires_grad:
                return Break("A parameter or other state was frozen or unfrozen.")
        for location, form_of, form in self.forms:
            if form_of(location.get()) != form:
                return Break(f"{location} has another shape, dtype or layout than before.", location)
        return None if self.layouts() else Break("A parameter or other state was given another shape or layout.")

    def _hooks(self) -> list[Any]:
        counts: list[Any] = hooks_for_all()
        for item in self.hooked:
            if isinstance(item, Tensor):
                counts.append(has_tensor_hooks(item))
            elif isinstance(item, nn.Module):
                counts.append(
                    len(item._forward_hooks)
                    + len(item._forward_pre_hooks)
                    + len(item._backward_hooks)
                    + len(item._backward_pre_hooks)
                )
            elif isinstance(item, Optimizer):
                counts.append(len(item._optimizer_step_pre_hooks) + len(item._optimizer_step_post_hooks))
        return counts


def _hooks_clock() -> tuple[int, ...]:
    """Numbers that change when a hook is registered, or one that is for all modules or optimizers removed."""
    return (next_hook(), *map(len, HOOKS_FOR_ALL))


def _view_of(holder: Any) -> Any:
    return holder.view() if isinstance(holder, Attributes) else holder


def _is_unchanged(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        return bool(container == copy)  # modules and hooks, which compare by identity
    return len(container) == len(copy) and all(map(is_, container, copy))


def _keys(container: Any) -> Iterable[Any]:
    return container if isinstance(container, dict) else range(len(container))


_GRADIENT = attrgetter("grad")
_PARTS: tuple[Callable[[Any], Any], ...] = (
    type,
    *map(attrgetter, ("__mro__", "__code__", "__defaults__", "__kwdefaults__")),
)
"""What may be pinned, in the order in which compiled code knows them."""
_OBJECT, _CLASS, _FUNCTION = _PARTS[:1], _PARTS[1:2], _PARTS[2:]

MAX_COMPARED = 10_000
"""Of longer containers only the length is compared in each call: one object takes 20 ns."""

MAX_BYTES = 1 << 20
"""Likewise of arrays: a mebibyte takes a tenth of a millisecond."""
