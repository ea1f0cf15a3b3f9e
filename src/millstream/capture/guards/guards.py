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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, contains, getitem, is_
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream._torch.hooks import has_tensor_hooks, hooks_clock, hooks_for_all
from millstream._torch.tensors import layout_check
from millstream.capture.effects.places import ValuePlace
from millstream.capture.guards.native import QuickGuards, load_library
from millstream.capture.state.attributes import Attributes, Items
from millstream.capture.state.discover import MAX_ITEMS, MISSING
from millstream.capture.state.signature import SCALARS, Reference, TensorMeta, is_same, meta_of, walk
from millstream.capture.state.snapshot import differs, look
from millstream.capture.step.request import Request, Traced
from millstream.capture.trace.patches.optimizers import CountPlace, NumberPlace
from millstream.capture.trace.patches.scaler import is_idle


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that no longer holds.

    Attributes:
        reason: In a sentence.
        holder: Dict, list or other object that changed, if any.
        key: Key of the entry that changed.
        is_final: Whether it will not hold again: state was replaced.
        is_tensor: Whether the entry held a tensor.
    """

    reason: str
    holder: Any = None
    key: Any = None
    is_final: bool = False
    is_tensor: bool = False


MAX_DEPTH = 3
"""Lists and dicts in an optimizer's groups are looked into so far."""


@dataclass(slots=True)
class Entries:
    """Entries of dicts and lists, and what they held.

    Attributes:
        holders: The dicts and lists.
        keys: Keys or indices.
        values: What was there.
    """

    holders: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, holder: Any, key: Any, value: Any) -> None:
        """Append an entry."""
        self.holders.append(holder)
        self.keys.append(key)
        self.values.append(value)

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
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
        copies: Dicts of submodules or hooks, lists of groups or parameters, and copies of them.
        sized: Lists and dicts of the user's, whose entries are among the others.
        sizes: Their lengths.
        loose: Sets and deques of the user's, dicts of submodules whose order counts, and copies of them.
        watched: Tensors whose gradients count.
        gradients: The gradient that each of them must have.
        placed: Those, and all other state of the graph.
        required_grad: Whether they require a gradient.
        addresses: Where their data is: ``tensor.data = ...`` keeps the object.
        layouts: Whether their sizes and strides are as before, and ``required_grad``.
        hooked: Tensors, modules and optimizers whose hooks count.
        names: How to call an entry, by id of the holder and key.
        owned: Entries, in the same form, that hold state of the step.
        held: Places whose tensors are read as if they were arguments: holder, key, form of
            the tensor.
        scalers: Gradient scalers, which must be between ``update`` and ``unscale_``.
        hook_clock: Changes with the hooks; as it was when they were last looked at.
        hook_state: Numbers of hooks of ``hooked``, and the hooks for all modules and optimizers.
        quick: The same conditions, but for scalers and hooks, in compiled code.
    """

    plain: Entries = field(default_factory=Entries)
    objects: Entries = field(default_factory=Entries)
    absent: Entries = field(default_factory=Entries)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    loose: list[tuple[Any, Any]] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    placed: list[Tensor] = field(default_factory=list)
    required_grad: list[bool] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    layouts: Callable[[], bool] = bool
    hooked: list[Any] = field(default_factory=list)
    names: dict[tuple[int, Any], str] = field(default_factory=dict)
    owned: set[tuple[int, Any]] = field(default_factory=set)
    held: list[tuple[Any, Any, tuple[type, TensorMeta | None]]] = field(default_factory=list)
    scalers: list[GradScaler] = field(default_factory=list)
    hook_clock: tuple[int, ...] = ()
    hook_state: list[Any] = field(default_factory=list)
    quick: QuickGuards | None = None

    def expect(self, holder: Any, key: Any, value: Any, name: str | None = None) -> None:
        """Add an entry, which may be ``MISSING``, or a closure cell."""
        if isinstance(holder, Attributes):
            holder = holder.view()
        if name is not None:
            self.names[id(holder), key] = name
        if isinstance(holder, CellType):
            self.cells.append((holder, value))
        elif value is MISSING:
            self.absent.add(holder, key, value)
        else:
            (self.plain if isinstance(value, SCALARS) else self.objects).add(holder, key, value)

    def measure(self, name: str, container: Any) -> None:
        """Expect ``container`` to keep its length; a set or deque, whose items are no entries, all that it holds."""
        self.names[id(container), None] = name
        if isinstance(container, list | dict | Items):
            self.sized.append(container)
            self.sizes.append(len(container))
        else:
            self.loose.append((container, container.copy()))

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Expect ``tensors`` to stay where they are."""
        self.placed += tensors
        self.required_grad += (tensor.requires_grad for tensor in tensors)
        self.addresses += map(Tensor.data_ptr, tensors)
        self.layouts = layout_check(self.placed)

    def note_hooks(self) -> None:
        """Remember which hooks there are now."""
        self.hook_clock = hooks_clock()
        self.hook_state = self._hooks()

    def quicken(self, written: Sequence[Tensor]) -> None:
        """From now on let compiled code look first, where it can be had; it also counts up versions of ``written``."""
        library = load_library()
        if library is None:
            return
        entries = [*self.plain, *self.objects, *self.absent, *((cell, None, value) for cell, value in self.cells)]
        for container, copy in self.copies:
            entries += ((container, key, look(copy, key)) for key in _keys(copy))
        containers = [*(container for container, _ in self.copies), *self.sized]
        gradient_of = dict(zip(map(id, self.watched), self.gradients, strict=True))
        gradients = [gradient_of.get(id(tensor)) for tensor in self.placed]
        with contextlib.suppress(ValueError):
            self.quick = QuickGuards(library, entries, containers, self.placed, gradients, written)

    def hold(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Compare with the state at capture.

        Returns:
            ``None`` if anything differs. Otherwise the tensors whose gradient is not where it must be, and where that
            is.
        """
        if self.hook_clock != hooks_clock():
            if self.hook_state != self._hooks():
                return None
            self.hook_clock = hooks_clock()
        if self.scalers and not all(map(is_idle, self.scalers)):
            return None
        if not all(_form_of(look(holder, key)) == form for holder, key, form in self.held):
            return None
        if self.loose and any(differs(container, copy) for container, copy in self.loose):
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

    def _entries_hold(self) -> bool:
        try:
            return (
                [*map(len, self.sized)] == self.sizes  # first: to ask an optimizer's state for what is gone makes it
                and self.objects.compare(is_)
                and (self.plain.compare(is_) or self.plain.compare(is_same))
                and not any(map(contains, self.absent.holders, self.absent.keys))
                and all(is_same(cell.cell_contents, value) for cell, value in self.cells)
                and all(_is_unchanged(container, copy) for container, copy in self.copies)
            )
        except (KeyError, IndexError, ValueError, RuntimeError):
            return False

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        cells = ((cell, None, value) for cell, value in self.cells)
        for holder, key, value in (*self.plain, *self.objects, *self.absent, *cells):
            if not is_same(look(holder, key), value):
                name = self.names.get((id(holder), key)) or str(key)
                is_final, is_tensor = (id(holder), key) in self.owned, isinstance(value, Tensor)
                return Break(f"{name} is another than before.", holder, key, is_final, is_tensor)
        change = self._changed_container() or self._changed_tensor()
        if change is not None:
            return change
        if not all(map(is_idle, self.scalers)):
            return Break("Gradients were unscaled outside of the step.")
        return Break("A hook was registered or removed.") if self.hook_state != self._hooks() else None

    def _changed_container(self) -> Break | None:
        sized = zip(self.sized, self.sizes, strict=True)
        changed = [container for container, size in sized if len(container) != size]
        changed += (container for container, copy in self.loose if differs(container, copy))
        for container in changed:
            return Break(f"{self.names[id(container), None]} holds other items than before.", container)
        for container, copy in self.copies:
            if not _is_unchanged(container, copy):
                return Break(
                    "A submodule, hook, parameter group or parameter was replaced, added or removed.", container
                )
        return None

    def _changed_tensor(self) -> Break | None:
        for tensor, requires_grad, address in zip(self.placed, self.required_grad, self.addresses, strict=True):
            if tensor.data_ptr() != address:
                return Break("A parameter or other state was moved or converted.", tensor, is_final=True)
            if tensor.requires_grad is not requires_grad:
                return Break("A parameter or other state was frozen or unfrozen.", tensor)
        for holder, key, form in self.held:
            if _form_of(look(holder, key)) != form:
                name = self.names.get((id(holder), key)) or str(key)
                return Break(f"{name} has another shape, dtype or layout than before.", holder, key)
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


def make_guards(
    request: Request, traced: Traced, gradients: Sequence[Tensor | None], homes: Iterable[Tensor]
) -> Guards:
    """Derive the conditions of a graph.

    Args:
        request: What was traced.
        traced: The trace.
        gradients: The gradients that the tensors of ``request.gradients`` must have.
        homes: Gradients that are inputs of the graph.
    """
    guards = Guards()
    outputs = (*traced.outputs, *(write.output for write in traced.effects.writes))
    returned = {id(output.value) for output in outputs if output.kind == "object"}
    returned |= {id(part.target) for _, part in walk(traced.structure, "") if isinstance(part, Reference)}
    used = {
        id(entry.tensor): entry
        for index, entry in enumerate(request.state)
        if index in traced.state or id(entry.tensor) in returned
    }
    for index, holder, key in traced.replaced:
        entry = request.state[index]
        guards.held.append((holder, key, _form_of(entry.tensor)))
        guards.names[id(holder), key] = entry.name
    _add_readings(guards, request, traced, used)
    for entry in used.values():
        for holder, key in entry.places:
            guards.objects.add(holder, key, entry.tensor)
            guards.names[id(holder), key] = entry.name
            guards.owned.add((id(holder), key))
    gradient_of = {id(item.parameter): now for item, now in zip(request.gradients, gradients, strict=True)}
    tensors: list[Tensor] = [entry.tensor for entry in used.values() if isinstance(entry.tensor, nn.Parameter)]
    tensors += [gradient.parameter for gradient in request.gradients]
    watched = {id(tensor): tensor for tensor in tensors}
    guards.hooked += watched.values()
    guards.watched = [*watched.values(), *homes]
    guards.gradients = [gradient_of.get(id(tensor)) for tensor in guards.watched]
    mirrored = {id(request.state[index].tensor) for index in request.mirrored}
    others = (entry.tensor for key, entry in used.items() if key not in watched and key not in mirrored)
    guards.place([*guards.watched, *others])
    for module in (module for _, module in request.found.modules):
        _add_tree(guards, module)
    free = {
        (id(place.optimizer), place.group, place.key, place.item)
        for place in request.numbers
        if isinstance(place, NumberPlace)
    }
    stepped = set(map(id, traced.optimizers))
    for name, optimizer in request.found.optimizers:
        _add_optimizer(guards, name, optimizer, free, has_stepped=id(optimizer) in stepped)
    for _, scaler in request.found.scalers:
        guards.scalers.append(scaler)
        for key, value in vars(scaler).items():
            if isinstance(value, SCALARS):
                guards.plain.add(vars(scaler), key, value)
    guards.note_hooks()
    return guards


def _add_readings(guards: Guards, request: Request, traced: Traced, used: Container[int]) -> None:
    """Expect the Python values that the step may have read."""
    lifted = {(id(place.holder), place.key) for place in request.numbers if isinstance(place, ValuePlace)}
    for attributes, attribute, value in traced.reads:
        if (id(attributes), attribute) not in lifted:
            guards.expect(attributes, attribute, value)
    targets = traced.effects.targets
    stored = {(id(write.holder), write.key) for write in traced.effects.writes}  # and not known by a link
    groups = {id(group) for _, optimizer in request.found.optimizers for group in optimizer.param_groups}
    counts = [place for place in request.numbers if isinstance(place, CountPlace)]
    counted = {(id(entry), place.key) for place in counts for entry in place.entries} | lifted
    for link in traced.used.links:
        is_counted = (id(link.holder), link.key) in counted
        if id(link.holder) in groups or is_counted or id(link.holder) in targets:  # see _add_optimizer
            continue
        stored.discard((id(link.holder), link.key))
        # A tensor that the graph does not read may be another; what is no tensor may tell the step to make one.
        if not isinstance(link.value, Tensor) or id(link.value) in used:
            guards.expect(link.holder, link.key, link.value, link.name)
    for write in traced.effects.writes:
        holder, key, output = write.holder, write.key, write.output
        is_new = not isinstance(holder, CellType) and look(holder, key) is MISSING
        is_made = output.kind != "object" or isinstance(output.value, SCALARS)
        if is_new and is_made and (id(holder), key) in stored:
            guards.expect(holder, key, MISSING)
    for name, container in traced.used.watched:
        if id(container) not in targets:
            guards.measure(name, container)


def _add_tree(guards: Guards, root: nn.Module) -> None:
    for module in root.modules():
        guards.measure("A module's parameters", module._parameters)
        guards.measure("A module's buffers", module._buffers)
        guards.hooked.append(module)
        for container in (module._modules, module._forward_hooks, module._forward_pre_hooks):
            if container:
                guards.copies.append((container, dict(container)))
        if not module._modules and _may_have_children(module):
            guards.measure("A module's submodules", module._modules)
        if isinstance(module, nn.ModuleDict) and len(module._modules) > 1:
            guards.names[id(module._modules), None] = "A ModuleDict"
            guards.loose.append((module._modules, dict(module._modules)))  # for their order
        for holder in (module._parameters, module._buffers):
            for key, value in holder.items():
                if value is None:  # an absent bias may be given one
                    guards.plain.add(holder, key, None)


def _add_optimizer(
    guards: Guards, name: str, optimizer: Optimizer, free: set[tuple[int, int, str, int | None]], *, has_stepped: bool
) -> None:
    for key in ("state", "param_groups"):
        guards.objects.add(vars(optimizer), key, vars(optimizer)[key])
        guards.names[id(vars(optimizer)), key] = f"{name}.{key}"
        guards.owned.add((id(vars(optimizer)), key))
    guards.copies.append((optimizer.param_groups, [*optimizer.param_groups]))
    guards.hooked.append(optimizer)
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        guards.copies.append((hooks, dict(hooks)))
    if has_stepped:
        guards.measure(f"{name}.state", optimizer.state)
        for parameter, entry in optimizer.state.items():
            guards.objects.add(optimizer.state, parameter, entry)
            guards.names[id(optimizer.state), parameter] = f"{name}.state of a parameter"
            guards.owned.add((id(optimizer.state), parameter))
    for number, group in enumerate(optimizer.param_groups):
        guards.copies.append((group["params"], [*group["params"]]))
        guards.objects.add(group, "params", group["params"])
        lifted = {(key, item) for owner, place, key, item in free if (owner, place) == (id(optimizer), number)}
        if has_stepped:
            _add_group(guards, f"{name}.param_groups[{number}]", group, lifted)


def _add_group(guards: Guards, name: str, group: dict[str, Any], lifted: set[tuple[str, int | None]]) -> None:
    """Expect what an optimizer may read of a group to be what it was, but for numbers that a graph is given anew."""
    lifted_keys = {key for key, _ in lifted}
    for key, value in group.items():
        guards.names[id(group), key] = f"{name}[{key!r}]"
        if isinstance(value, SCALARS):
            if (key, None) not in lifted:
                guards.plain.add(group, key, value)
        elif key == "params" or key in lifted_keys or isinstance(value, Tensor):
            continue
        elif isinstance(value, tuple):
            has_tensors = any(isinstance(item, Tensor) for item in value)
            (guards.objects if has_tensors else guards.plain).add(group, key, value)
        else:
            guards.objects.add(group, key, value)
            _add_contents(guards, guards.names[id(group), key], value, MAX_DEPTH)


def _add_contents(guards: Guards, name: str, container: Any, depth: int) -> None:
    """Expect a list or dict that an optimizer may read to hold what it holds, and so those within it."""
    if depth == 0 or not isinstance(container, list | dict) or len(container) > MAX_ITEMS:
        return
    guards.measure(name, container)
    for key in _keys(container):
        guards.expect(container, key, container[key], f"{name}[{key!r}]")
        _add_contents(guards, f"{name}[{key!r}]", container[key], depth - 1)


def _may_have_children(module: nn.Module) -> bool:
    """Whether it, or code of the user's, goes through its submodules: PyTorch's own layers have none to go through."""
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not type(module).__module__.startswith(
        "torch.nn.modules"
    )


def _is_unchanged(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        return bool(container == copy)  # modules and hooks, which compare by identity
    return len(container) == len(copy) and all(map(is_, container, copy))


def _form_of(value: Any) -> tuple[type, TensorMeta | None]:
    return type(value), meta_of(value) if isinstance(value, Tensor) else None


def _keys(container: Any) -> Iterable[Any]:
    return container if isinstance(container, dict) else range(len(container))


_GRADIENT = attrgetter("grad")
