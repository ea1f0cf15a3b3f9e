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
from operator import attrgetter, getitem, is_
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream.capture import torch_private
from millstream.capture.discover import MISSING, Link
from millstream.capture.python_state import look
from millstream.capture.quick import QuickGuards, load_library
from millstream.capture.request import Request, Traced
from millstream.capture.scaler import is_idle
from millstream.capture.signature import SCALARS, Reference, TensorMeta, is_same, meta_of, walk


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
        cells: Closure cells and their contents.
        copies: Dicts of submodules or hooks, lists of groups or parameters, and copies of them.
        watched: Tensors whose own properties count.
        required_grad: Whether they require a gradient.
        addresses: Where their data is: ``tensor.data = ...`` keeps the object.
        gradients: The gradient that each of them must have.
        hooked: Tensors, modules and optimizers whose hooks count.
        names: How to call an entry, by id of the holder and key.
        owned: Entries, in the same form, that hold state of the step.
        held: Places whose tensors are read as if they were arguments: holder, key, form of
            the tensor.
        scalers: Gradient scalers, which must be between ``update`` and ``unscale_``.
        hook_count: Number of hooks ever registered, when last looked at.
        hook_state: Numbers of hooks of ``hooked``.
        quick: The same conditions, but for scalers and hooks, in compiled code.
    """

    plain: Entries = field(default_factory=Entries)
    objects: Entries = field(default_factory=Entries)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    required_grad: list[bool] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    hooked: list[Any] = field(default_factory=list)
    names: dict[tuple[int, Any], str] = field(default_factory=dict)
    owned: set[tuple[int, Any]] = field(default_factory=set)
    held: list[tuple[Any, Any, tuple[type, TensorMeta | None]]] = field(default_factory=list)
    scalers: list[GradScaler] = field(default_factory=list)
    hook_count: int = -1
    hook_state: list[int] = field(default_factory=list)
    quick: QuickGuards | None = None

    def watch(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Watch the properties of ``tensor``, which must have ``gradient``."""
        self.watched.append(tensor)
        self.required_grad.append(tensor.requires_grad)
        self.addresses.append(tensor.data_ptr())
        self.gradients.append(gradient)

    def note_hooks(self) -> None:
        """Remember which hooks there are now."""
        self.hook_count = torch_private.count_hooks()
        self.hook_state = self._hooks()

    def quicken(self, written: Sequence[Tensor]) -> None:
        """From now on let compiled code look first, where it can be had; it also counts up versions of ``written``."""
        library = load_library()
        if library is None:
            return
        entries = [*self.plain, *self.objects, *((cell, None, value) for cell, value in self.cells)]
        for container, copy in self.copies:
            entries += ((container, key, look(copy, key)) for key in _keys(copy))
        containers = [container for container, _ in self.copies]
        with contextlib.suppress(ValueError):
            self.quick = QuickGuards(library, entries, containers, self.watched, self.gradients, written)

    def hold(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Compare with the state at capture.

        Returns:
            ``None`` if anything differs. Otherwise the tensors whose gradient is not where it must be, and where that
            is.
        """
        if self.hook_count != torch_private.count_hooks():
            if self.hook_state != self._hooks():
                return None
            self.hook_count = torch_private.count_hooks()
        if self.scalers and not all(map(is_idle, self.scalers)):
            return None
        if not all(_form_of(look(holder, key)) == form for holder, key, form in self.held):
            return None
        if self.quick is not None and self.quick.hold():
            return []
        if not self._entries_hold():
            return None
        if [*map(Tensor.data_ptr, self.watched)] != self.addresses:
            return None
        if [*map(_REQUIRES_GRAD, self.watched)] != self.required_grad:
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
                self.objects.compare(is_)
                and (self.plain.compare(is_) or self.plain.compare(is_same))
                and all(is_same(cell.cell_contents, value) for cell, value in self.cells)
                and all(_is_unchanged(container, copy) for container, copy in self.copies)
            )
        except (KeyError, IndexError, ValueError, RuntimeError):
            return False

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        cells = ((cell, None, value) for cell, value in self.cells)
        for holder, key, value in (*self.plain, *self.objects, *cells):
            if not is_same(look(holder, key), value):
                name = self.names.get((id(holder), key), str(key))
                is_final, is_tensor = (id(holder), key) in self.owned, isinstance(value, Tensor)
                return Break(f"{name} is another than before.", holder, key, is_final, is_tensor)
        for container, copy in self.copies:
            if not _is_unchanged(container, copy):
                return Break(
                    "A submodule, hook, parameter group or parameter was replaced, added or removed.", container
                )
        for tensor, requires_grad, address in zip(self.watched, self.required_grad, self.addresses, strict=True):
            if tensor.data_ptr() != address:
                return Break("A parameter was moved or converted.", tensor, is_final=True)
            if tensor.requires_grad is not requires_grad:
                return Break("A parameter was frozen or unfrozen.", tensor)
        for holder, key, form in self.held:
            if _form_of(look(holder, key)) != form:
                name = self.names.get((id(holder), key), str(key))
                return Break(f"{name} has another shape, dtype or layout than before.", holder, key)
        if not all(map(is_idle, self.scalers)):
            return Break("Gradients were unscaled outside of the step.")
        return Break("A hook was registered or removed.") if self.hook_state != self._hooks() else None

    def _hooks(self) -> list[int]:
        counts: list[int] = []
        for item in self.hooked:
            if isinstance(item, Tensor):
                counts.append(torch_private.has_tensor_hooks(item))
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
    for attributes, attribute, value in traced.reads:
        guards.plain.add(attributes, attribute, value)
    outputs = (*traced.outputs, *(output for _, _, output in traced.effects))
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
    for link in request.found.links:
        _add_link(guards, link, used)
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
    for tensor in (*watched.values(), *homes):
        guards.watch(tensor, gradient_of.get(id(tensor)))
    for module in (module for _, module in request.found.modules):
        _add_tree(guards, module)
    free = {(id(place.optimizer), place.group, place.key, place.item) for place in request.numbers}
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


def _add_link(guards: Guards, link: Link, used: Container[int]) -> None:
    if link.value is MISSING or (isinstance(link.value, Tensor) and id(link.value) not in used):
        return
    guards.names[id(link.holder), link.key] = link.name
    if link.key is None:
        guards.cells.append((link.holder, link.value))
    elif isinstance(link.value, SCALARS):
        guards.plain.add(link.holder, link.key, link.value)
    else:
        guards.objects.add(link.holder, link.key, link.value)


def _add_tree(guards: Guards, root: nn.Module) -> None:
    for module in root.modules():
        guards.hooked.append(module)
        for container in (module._modules, module._forward_hooks, module._forward_pre_hooks):
            if container:
                guards.copies.append((container, dict(container)))
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
    for number, group in enumerate(optimizer.param_groups):
        guards.copies.append((group["params"], [*group["params"]]))
        guards.objects.add(group, "params", group["params"])
        for key, value in group.items() if has_stepped else ():
            guards.names[id(group), key] = f"{name}.param_groups[{number}][{key!r}]"
            if isinstance(value, SCALARS):
                if (id(optimizer), number, key, None) not in free and not key.startswith("initial_"):
                    guards.plain.add(group, key, value)
            elif isinstance(value, tuple):
                if any((id(optimizer), number, key, item) in free for item in range(len(value))):
                    continue
                (guards.objects if any(isinstance(item, Tensor) for item in value) else guards.plain).add(
                    group, key, value
                )


def _is_unchanged(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        return bool(container == copy)  # modules and hooks, which compare by identity
    return len(container) == len(copy) and all(map(is_, container, copy))


def _form_of(value: Any) -> tuple[type, TensorMeta | None]:
    return type(value), meta_of(value) if isinstance(value, Tensor) else None


def _keys(container: Any) -> Iterable[Any]:
    return container if isinstance(container, dict) else range(len(container))


_REQUIRES_GRAD = attrgetter("requires_grad")
_GRADIENT = attrgetter("grad")
