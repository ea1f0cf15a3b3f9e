"""Check the assumptions of a captured graph before every replay.

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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import attrgetter, call, contains, eq, getitem, is_
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from millstream import _native
from millstream._torch.autograd.hooks import HOOKS_FOR_ALL, HOOKS_OF_MODULE, has_tensor_hooks, hooks_for_all, next_hook
from millstream._torch.distributed.fully_sharded import local_of
from millstream._torch.distributed.wrappers import NUM_WRAPPED, data_parallel_wrappers
from millstream._torch.modes.switches import precision_told_by
from millstream._torch.scaler import is_idle
from millstream._torch.tensors import layout_check
from millstream.capture.guards.breaks import Break, functions_in, is_same_original
from millstream.capture.guards.native import ALL, BORROWED, NOTHING, QuickGuards
from millstream.capture.lines import is_users_own
from millstream.capture.record.location import MISSING, Attributes, Items, Location, looked_into
from millstream.capture.state.contents import content_of, has_content, is_comparable, size_of
from millstream.capture.state.discover import MAX_ITEMS
from millstream.capture.state.signature import is_same
from millstream.capture.trace.branches.flags import StateFlag
from millstream.capture.trace.numbers.scalars import is_number
from millstream.device.compiled_switches import install_later
from millstream.locks import TRACING

ANOTHER = "{} is another than before."
_OTHER_ITEMS = "{} holds other items than before."
_PARTS = (type, *map(attrgetter, ("__mro__", "__code__", "__defaults__", "__kwdefaults__")))
"""What may be pinned of an object, a class and a function, in this order."""
_OBJECT, _CLASS, _FUNCTION = (0,), (1,), (2, 3, 4)


def _wrapped() -> set[int]:
    return {id(parameter) for wrapper in data_parallel_wrappers() for parameter in wrapper.parameters()}


def _itself(thing: Any) -> Any:
    return thing


def _is_of_library(holder: Any) -> bool:
    """Return whether it has the variables of a module that is not the user's own, and so hardly ever changes."""
    file = holder.get("__file__") if type(holder) is dict and "__spec__" in holder else None
    return isinstance(file, str) and not is_users_own(file)


@dataclass(slots=True)
class Check:
    """Conditions of one kind: what is read of each of some things passes a test, together with what was read first.

    The loop over them has no code of ours in it, where neither ``read`` nor ``test`` has.
    """

    reason: str  # what is wrong with one, with a place for its name
    read: Callable[[Any], Any]
    test: Callable[[Any, Any], Any] = eq
    things: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)  # of the things; or the locations of entries

    def add(self, thing: Any, name: Any = "", value: Any = MISSING) -> None:
        """Expect of ``thing`` what can be read of it now, or ``value``."""
        self.things.append(thing)
        self.names.append(name)
        self.values.append(self.read(thing) if value is MISSING else value)

    def now(self) -> Iterator[Any]:
        """Return what is read now."""
        return map(self.read, self.things)

    def holds(self) -> bool:
        """Return whether all of them hold."""
        if self.test is eq:
            return [*self.now()] == self.values
        if self.test is not is_same:
            return all(map(self.test, self.now(), self.values))
        now = [*self.now()]
        if not all(map(is_, now, self.values)):
            if not all(map(is_same, now, self.values)):
                return False
            self.values = now  # equal ones, with which the next call compares
        return True

    def broken(self) -> Iterator[Break]:
        """Yield those that don't."""
        for thing, name, value in zip(self.things, self.names, self.values, strict=True):
            now = MISSING
            with contextlib.suppress(KeyError, IndexError, ValueError, RuntimeError):
                now = self.read(thing)
                if self.test(now, value):
                    continue
            location = name if isinstance(name, Location) else None
            values = (value, now) if self.reason is ANOTHER else ()
            yield Break(self.reason.format(name), location, False, *values)


class Entries(Check):
    """Entries of dicts, lists and the like; the things are functions in C that look one up, with their arguments."""

    def __init__(
        self, test: Callable[[Any, Any], Any] = is_same, read: Callable[[Any], Any] = lambda thing: call(*thing)
    ) -> None:
        super().__init__(ANOTHER, read, test)

    def now(self) -> Iterator[Any]:
        return starmap(call, self.things)

    def expect(self, location: Location, value: Any) -> None:
        """Expect ``value`` at a location."""
        holder, key = looked_into(location.holder), location.key
        thing = (dict.get, holder.owner, key, MISSING) if isinstance(holder, Items) else (getitem, holder, key)
        self.add(thing, location, value)

    def triples(self) -> Iterator[tuple[Any, Any, Any]]:
        """Holders, keys and values."""
        for (_, holder, key, *_), value in zip(self.things, self.values, strict=True):
            yield holder, key, value


class BorrowedEntries(Entries):
    """Entries of PyTorch and Python's library. Each may be absent; a wrapper of ours stands for what it wraps."""

    def __init__(self) -> None:
        super().__init__(is_same_original, lambda place: dict.get(*place))

    def expect(self, location: Location, value: Any) -> None:
        self.add((location.holder, location.key, MISSING), location, value)

    def now(self) -> Iterator[Any]:
        return starmap(dict.get, self.things)

    def holds(self) -> bool:
        return all(map(is_, self.now(), self.values)) or all(map(self.test, self.now(), self.values))

    def triples(self) -> Iterator[tuple[Any, Any, Any]]:
        return ((holder, key, value) for (holder, key, _), value in zip(self.things, self.values, strict=True))


class AbsentEntries(Entries):
    """Entries of a namespace that must not be there."""

    def __init__(self) -> None:
        super().__init__(is_, lambda pair: contains(*pair))

    def expect(self, location: Location, value: Any) -> None:
        self.add((looked_into(location.holder), location.key), location, value)

    def holds(self) -> bool:
        return not any(starmap(contains, self.things))

    def broken(self) -> Iterator[Break]:
        for change in super().broken():
            yield replace(change, before=MISSING, now=change.location.get() if change.location else MISSING)


class Guards:
    """Conditions under which a graph may be replayed."""

    def __init__(self) -> None:
        self.sizes = Check(_OTHER_ITEMS, len)
        self.orders = Check(_OTHER_ITEMS, tuple, is_same)  # keys of dicts whose order may count
        parts = ("class", "__mro__", "__code__", "__defaults__", "__kwdefaults__")
        self.pins = [
            Check(f"{{}} has another {name} than before.", part, is_) for part, name in zip(_PARTS, parts, strict=True)
        ]
        self.entries = Entries()
        self.absent = AbsentEntries()
        self.cells = Check(ANOTHER, attrgetter("cell_contents"), is_same)
        self.borrowed = BorrowedEntries()
        # Compiled code does not know these.
        self.scalers = Check("Gradients were unscaled outside of the step.", is_idle)
        # What places hold looks as it did, though it may be another.
        self.forms = Check("{} has another shape, dtype or layout than before.", lambda pair: pair[0](pair[1].get()))
        self.precisions = Check("{}() gives another precision than before.", precision_told_by)
        self.flags = Check("{} has another value than before.", StateFlag.now)
        self.contents = Check(_OTHER_ITEMS, _itself, has_content)  # of sets, deques, arrays and such
        self.dicts = Check("{} has another __dict__ than before.", vars, is_)  # of objects that are no modules
        self.owned: set[Location] = set()  # entries that hold state of the step
        self.watched: list[Tensor] = []  # tensors whose gradients count
        self.gradients: list[Tensor | None] = []  # that each of them must have
        self.placed = Check("A parameter or other state was moved or converted.", Tensor.data_ptr)  # these, all state
        self.frozen = Check("A parameter or other state was frozen or unfrozen.", attrgetter("requires_grad"))
        self.shards = Check("A sharded parameter or its state was given other memory.", local_of, is_)
        self.layouts: Callable[[], bool] = bool  # whether sizes, strides and ``requires_grad`` are as before
        self.hooks = Check("A hook was registered or removed.", _hooks_of)  # of tensors, modules and all modules
        self.hooks.add(None)
        self.hook_clock = _hooks_clock()  # changes with the hooks; as it was when they were last looked at
        self.num_wrapped = NUM_WRAPPED[0]  # how many data-parallel wrappers there were when last looked at
        self.wrapped = _wrapped()  # by id, parameters that belonged to such at the capture
        self.quick: QuickGuards | None = None
        self.is_quickened = False  # whether that was tried, be it in vain
        self._slow: list[Check] = []  # those of the checks that have something to look at
        self._quick: list[Check] = []  # likewise, that compiled code does, too
        self._borrowed: list[Check] = []  # likewise, which compiled code tells apart

    # --- what is expected ---------------------------------------------------------------------------------------------

    def expect(self, location: Location, value: Any) -> None:
        """Expect a place to hold ``value``, which may be ``MISSING``: plain values by value, others by identity."""
        if isinstance(location.holder, CellType):
            self.cells.add(location.holder, location, value)
        elif value is MISSING:
            self.absent.expect(location, False)
        else:
            self.entries.expect(location, value)

    def expect_borrowed(self, places: dict[Location, Any], codes: Container[int]) -> None:
        """Expect functions and classes of PyTorch's and Python's to stay, and code that ran of them, given by id."""
        pinned = {id(function): function for value in places.values() for function in functions_in(value)}
        for location, value in places.items():
            self.borrowed.expect(location, value)
        for function in pinned.values():
            if id(function.__code__) in codes:
                self.pin(function)

    def expect_same(self, location: Location, value: Any) -> None:
        """Expect a place to hold the very object ``value``, which is state of the step."""
        self.entries.expect(location, value)
        self.owned.add(location)

    def expect_form(self, location: Location, form_of: Callable[[Any], Any]) -> None:
        """Expect that what a place holds looks as it does now, though it may be another."""
        self.forms.add((form_of, location), location)

    def measure(self, name: str, container: Any, *, is_ordered: bool = False) -> None:
        """Expect ``container`` to keep its length, or its keys in their order.

        And what has no entries that are expected by themselves, such as a set, an array or a long list, all that it
        holds, or at least its length.
        """
        has_entries = isinstance(container, list | dict | Attributes)
        if is_ordered and (isinstance(container, OrderedDict | Items) or size_of(container) > MAX_ITEMS):
            has_entries = False
        if not has_entries and is_comparable(container):
            self.contents.add(container, name, content_of(container))
        elif has_entries and is_ordered and isinstance(container, dict) and container:
            self.orders.add(container, name)
        else:
            self.sizes.add(container.view() if isinstance(container, Attributes) else container, name)

    def pin(self, owner: Any) -> None:
        """Expect an object to keep its class and its dict, a class its bases, a function its code and defaults."""
        name = (owner if isinstance(owner, type | FunctionType) else type(owner)).__qualname__
        for part in _FUNCTION if isinstance(owner, FunctionType) else _CLASS if isinstance(owner, type) else _OBJECT:
            self.pins[part].add(owner, name)
        if not isinstance(owner, nn.Module | type | FunctionType) and _has_own_dict(owner):
            self.dicts.add(owner, name)

    def copy(self, name: str, container: Any) -> None:
        """Expect a dict or list to hold the very objects that it holds."""
        self.measure(name, container)
        for key in container if isinstance(container, dict) else range(len(container)):
            self.entries.expect(Location(container, key, f"{name}[{key!r}]"), container[key])

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Expect ``tensors`` to stay where they are."""
        for tensor in tensors:
            own = local_of(tensor)
            self.placed.add(own)
            self.frozen.add(tensor)
            if own is not tensor:
                self.shards.add(tensor, value=own)
        self.layouts = layout_check(self.placed.things)

    def settle(self) -> None:
        """Nothing more is expected."""
        known = (self.sizes, self.orders, *self.pins, self.entries, self.absent, self.cells, self.placed)
        self._quick = [check for check in known if check.things]
        self._borrowed = [self.borrowed] if self.borrowed.things else []
        self._slow = [
            check
            for check in (self.scalers, self.forms, self.precisions, self.contents, self.dicts, self.shards, self.flags)
            if check.things
        ]
        if self.shards.things:  # which compiled code does not look into
            self._slow.append(self.frozen)
            self.is_quickened = True

    def quicken(self, written: Sequence[Tensor]) -> None:
        """From now on let compiled code look first, where it can be had; it also counts up versions of ``written``."""
        if self.is_quickened:
            return
        self.is_quickened = True
        install_later()
        entries = [*self.entries.triples()]
        entries += ((*pair, MISSING) for pair in self.absent.things)
        entries += ((cell, None, value) for cell, value in zip(self.cells.things, self.cells.values, strict=True))
        gradient_of = dict(zip(map(id, self.watched), self.gradients, strict=True))
        gradients = [gradient_of.get(id(tensor)) for tensor in self.placed.things]
        pins = [
            (owner, part, value)
            for part, check in enumerate(self.pins[: _FUNCTION[0]])
            for owner, value in zip(check.things, check.values, strict=True)
        ]
        code, *defaults = (check.values for check in self.pins[_FUNCTION[0] :])
        functions = [*zip(self.pins[_FUNCTION[0]].things, code, *defaults, strict=True)]
        borrowed = [*self.borrowed.triples(), *(entry for entry in entries if _is_of_library(entry[0]))]
        with contextlib.suppress(ValueError):
            self.quick = QuickGuards(
                [entry for entry in entries if not _is_of_library(entry[0])],
                self.sizes.things,
                [*zip(self.orders.things, self.orders.values, strict=True)],
                pins,
                functions,
                self.placed.things,
                gradients,
                written,
                borrowed,
            )

    def quicken_if_made(self, written: Sequence[Tensor]) -> None:
        """``quicken``, once the code is compiled, if all holds now."""
        if _native.is_ready("tensors"):
            self.quicken(written)
            if (
                not _all_hold([*self._quick, *self._borrowed]) or not self.layouts()
            ):  # the compiled code takes the memory that it finds
                self.quick = None

    # --- whether it holds ---------------------------------------------------------------------------------------------

    def hold(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Compare with the state at capture.

        Returns:
            ``None`` if anything differs. Otherwise the tensors whose gradient is not where it must be, and where that
            is.
        """
        if self.hook_clock != (clock := _hooks_clock()):
            if not self.hooks.holds():
                return None
            self.hook_clock = clock
        if self.num_wrapped != NUM_WRAPPED[0]:
            if self._is_wrapped():
                return None
            self.num_wrapped = NUM_WRAPPED[0]
        if not _all_hold(self._slow):
            return None
        held = self.quick.hold() if self.quick is not None else NOTHING
        if held == ALL:
            return []
        # Another thread that traces has its own in the place of some of PyTorch's functions: that is no change.
        if held != BORROWED and not (_all_hold(self._borrowed) or TRACING.is_elsewhere() or _all_hold(self._borrowed)):
            return None
        if not _all_hold(self._quick) or not self.layouts():
            return None
        gradients = [*map(_GRADIENT, self.watched)]
        if all(map(is_, gradients, self.gradients)):
            return []
        return [
            (tensor, expected)
            for tensor, now, expected in zip(self.watched, gradients, self.gradients, strict=True)
            if now is not expected
        ]

    def _is_wrapped(self) -> bool:
        return not (_wrapped() - self.wrapped).isdisjoint(map(id, self.placed.things))

    # --- why it doesn't -----------------------------------------------------------------------------------------------

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        for entries in (self.entries, self.absent, self.cells, self.borrowed):
            for change in entries.broken():
                return replace(change, is_final=change.location in self.owned)
        if self.num_wrapped != NUM_WRAPPED[0] and self._is_wrapped():
            return Break("A parameter belongs to a data-parallel model now.", is_final=True)
        for change in self.placed.broken():
            return replace(change, is_final=True)
        others = (
            self.sizes,
            self.orders,
            self.contents,
            *self.pins,
            self.dicts,
            self.frozen,
            self.forms,
            self.precisions,
            self.shards,
            self.flags,
        )
        for check in (*others, self.scalers, self.hooks):
            for change in check.broken():
                return change
        return None if self.layouts() else Break("A parameter or other state was given another shape or layout.")

    def numbers(self) -> Iterator[tuple[Location, bool]]:
        """Places of plain numbers, and whether they hold other numbers now."""
        for check in (self.entries, self.cells):
            for location, value in zip(check.names, check.values, strict=True):
                now = location.get()
                if is_number(value) and is_number(now):
                    yield location, not is_same(now, value)


def _all_hold(checks: Iterable[Check]) -> bool:
    """Return whether all conditions hold; one that cannot be looked at does not."""
    try:
        return all(check.holds() for check in checks)
    except (KeyError, IndexError, ValueError, RuntimeError):
        return False


def _hooks_of(owner: Tensor | nn.Module | None) -> Any:
    """Return how many hooks a module has, or whether a tensor has any.

    ``None``: those for all modules and optimizers.
    """
    if owner is None:
        return hooks_for_all()
    return (
        has_tensor_hooks(owner)
        if isinstance(owner, Tensor)
        else sum(len(getattr(owner, key)) for key in HOOKS_OF_MODULE)
    )


_GRADIENT = attrgetter("grad")


def _has_own_dict(owner: Any) -> bool:
    """Return whether an object has a dict, and not a property that makes one each time."""
    held = getattr(owner, "__dict__", None)
    return isinstance(held, dict) and held is owner.__dict__


def _hooks_clock() -> tuple[int, ...]:
    """Numbers that change when a hook is registered, or one that is for all modules or optimizers removed."""
    return (next_hook(), *map(len, HOOKS_FOR_ALL))
