"""What a captured graph took for granted, checked before every replay.

Each check looks at entries of dictionaries that were found once, where walking ``named_parameters()`` would cost a
microsecond for each tensor. Checks of one kind are gathered in *columns*: ``[holder[key] for holder in holders] ==
values`` takes some 20 ns for each entry, because comparing lists stops at identity. Where it does not, tensors compare
by value, which raises for all but tensors of one element: those are therefore compared by identity, one by one.

**Contract**
- ``hold`` is content only when a new capture would record the same graph over the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from millstream.capture import torch_private
from millstream.capture.discover import MISSING, Link
from millstream.capture.request import Request, Traced
from millstream.capture.scaler import is_idle
from millstream.capture.signature import SCALARS, Reference, is_same, walk


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that no longer holds.

    Attributes:
        reason: In a sentence.
        holder: Dict, list or other object that changed, if any.
        key: Key of the entry that changed.
        is_final: Whether it will not hold again: state was replaced.
    """

    reason: str
    holder: Any = None
    key: Any = None
    is_final: bool = False


@dataclass(slots=True)
class Column:
    """The same key of many dicts.

    Attributes:
        key: The key.
        holders: The dicts.
        values: What they held.
    """

    key: Any
    holders: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Guards:
    """Conditions under which a graph may be replayed.

    Attributes:
        values: Entries with plain Python values, compared by value.
        tensors: Entries with tensors of more than one element.
        objects: Other entries, compared by identity: dict or list, key, value.
        cells: Closure cells and their contents.
        copies: Dicts of submodules or hooks, lists of groups or parameters, and copies of them.
        watched: Tensors whose own properties count.
        required_grad: Whether they require a gradient.
        addresses: Where their data is: ``tensor.data = ...`` keeps the object.
        gradients: The gradient that each of them must have.
        hooked: Tensors, modules and optimizers whose hooks count.
        names: How to call an entry, by id of the holder and key.
        owned: Entries, in the same form, that hold state of the step.
        scalers: Gradient scalers, which must be between ``update`` and ``unscale_``.
        hook_count: Number of hooks ever registered, when last looked at.
        hook_state: Numbers of hooks of ``hooked``.
    """

    values: dict[Any, Column] = field(default_factory=dict)
    tensors: dict[Any, Column] = field(default_factory=dict)
    objects: list[tuple[Any, Any, Any]] = field(default_factory=list)
    cells: list[tuple[Any, Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    required_grad: list[bool] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    hooked: list[Any] = field(default_factory=list)
    names: dict[tuple[int, Any], str] = field(default_factory=dict)
    owned: set[tuple[int, Any]] = field(default_factory=set)
    scalers: list[GradScaler] = field(default_factory=list)
    hook_count: int = -1
    hook_state: list[int] = field(default_factory=list)
    _address_of: list[Callable[[], int]] = field(default_factory=list)
    _may_compare: bool = True

    def add_value(self, holder: Any, key: Any, value: Any) -> None:
        """Watch an entry with a plain value."""
        _append(self.values, holder, key, value)

    def add_object(self, holder: Any, key: Any, value: Any) -> None:
        """Watch an entry with an object, by identity."""
        if isinstance(value, Tensor) and value.numel() != 1:
            _append(self.tensors, holder, key, value)
        else:
            self.objects.append((holder, key, value))

    def watch(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Watch the properties of ``tensor``, which must have ``gradient``."""
        self.watched.append(tensor)
        self.required_grad.append(tensor.requires_grad)
        self.addresses.append(tensor.data_ptr())
        self.gradients.append(gradient)
        self._address_of.append(tensor.data_ptr)
        self._may_compare = self._may_compare and (gradient is None or gradient.numel() != 1)

    def note_hooks(self) -> None:
        """Remember which hooks there are now."""
        self.hook_count = torch_private.count_hooks()
        self.hook_state = self._hooks()

    def hold(self) -> list[tuple[Tensor, Tensor | None]] | None:  # noqa: C901, PLR0912 - one test for each kind: the hot path
        """Compare with the state at capture.

        Returns:
            ``None`` if anything differs. Otherwise the tensors whose gradient is not where it must be, and where that
            is.
        """
        try:
            for column in self.values.values():
                key = column.key
                if [holder[key] for holder in column.holders] != column.values:
                    return None
            for column in self.tensors.values():
                key = column.key
                if [holder[key] for holder in column.holders] != column.values:
                    return None
            for holder, key, value in self.objects:
                if holder[key] is not value:
                    return None
            for cell, value in self.cells:
                if not is_same(cell.cell_contents, value):
                    return None
            for container, copy in self.copies:
                if container != copy:
                    return None
        except (KeyError, IndexError, ValueError, RuntimeError):
            return None
        for scaler in self.scalers:
            if not is_idle(scaler):
                return None
        if [address() for address in self._address_of] != self.addresses:
            return None
        if [tensor.requires_grad for tensor in self.watched] != self.required_grad:
            return None
        if self.hook_count != torch_private.count_hooks():
            if self.hook_state != self._hooks():
                return None
            self.hook_count = torch_private.count_hooks()
        return self._find_strays()

    def _find_strays(self) -> list[tuple[Tensor, Tensor | None]]:
        gradients = [tensor.grad for tensor in self.watched]
        try:
            if self._may_compare and gradients == self.gradients:
                return []
        except RuntimeError:  # other tensors
            pass
        return [
            (tensor, expected)
            for tensor, now, expected in zip(self.watched, gradients, self.gradients, strict=True)
            if now is not expected
        ]

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        for holder, key, value in self._entries():
            if not is_same(_look(holder, key), value):
                name = self.names.get((id(holder), key), str(key))
                return Break(f"{name} is another than before.", holder, key, (id(holder), key) in self.owned)
        for cell, value in self.cells:
            if not is_same(cell.cell_contents, value):
                return Break(f"{self.names.get((id(cell), None), 'A closure variable')} is another than before.", cell)
        for container, copy in self.copies:
            if len(container) != len(copy) or any(_look(container, key) is not _look(copy, key) for key in _keys(copy)):
                return Break(
                    "A submodule, hook, parameter group or parameter was replaced, added or removed.", container
                )
        for tensor, requires_grad, address in zip(self.watched, self.required_grad, self.addresses, strict=True):
            if tensor.data_ptr() != address:
                return Break("A parameter was moved or converted.", tensor, is_final=True)
            if tensor.requires_grad is not requires_grad:
                return Break("A parameter was frozen or unfrozen.", tensor)
        if not all(map(is_idle, self.scalers)):
            return Break("Gradients were unscaled outside of the step.")
        return Break("A hook was registered or removed.") if self.hook_state != self._hooks() else None

    def _entries(self) -> Iterator[tuple[Any, Any, Any]]:
        for columns in (self.values, self.tensors):
            for column in columns.values():
                for holder, value in zip(column.holders, column.values, strict=True):
                    yield holder, column.key, value
        yield from self.objects

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
        guards.add_value(attributes, attribute, value)
    returned = {id(output.value) for output in traced.outputs if output.kind == "object"}
    returned |= {id(part.target) for _, part in walk(traced.structure, "") if isinstance(part, Reference)}
    used = {
        id(entry.tensor): entry
        for index, entry in enumerate(request.state)
        if index in traced.state or id(entry.tensor) in returned
    }
    stored = {(id(holder), key) for holder, key, _ in traced.effects}
    for link in request.found.links:
        if (id(link.holder), link.key) not in stored:
            _add_link(guards, link, used)
    for entry in used.values():
        for holder, key in entry.places:
            guards.add_object(holder, key, entry.tensor)
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
                guards.add_value(vars(scaler), key, value)
    guards.note_hooks()
    return guards


def _add_link(guards: Guards, link: Link, used: Container[int]) -> None:
    if link.value is MISSING or (isinstance(link.value, Tensor) and id(link.value) not in used):
        return
    guards.names[id(link.holder), link.key] = link.name
    if link.key is None:
        guards.cells.append((link.holder, link.value))
    elif isinstance(link.value, SCALARS):
        guards.add_value(link.holder, link.key, link.value)
    else:
        guards.add_object(link.holder, link.key, link.value)


def _add_tree(guards: Guards, root: nn.Module) -> None:
    for module in root.modules():
        guards.hooked.append(module)
        for container in (module._modules, module._forward_hooks, module._forward_pre_hooks):
            if container:
                guards.copies.append((container, dict(container)))
        for holder in (module._parameters, module._buffers):
            for key, value in holder.items():
                if value is None:  # an absent bias may be given one
                    guards.add_value(holder, key, None)


def _add_optimizer(
    guards: Guards, name: str, optimizer: Optimizer, free: set[tuple[int, int, str, int | None]], *, has_stepped: bool
) -> None:
    guards.objects += [
        (vars(optimizer), "state", optimizer.state),
        (vars(optimizer), "param_groups", optimizer.param_groups),
    ]
    for key in ("state", "param_groups"):
        guards.names[id(vars(optimizer)), key] = f"{name}.{key}"
        guards.owned.add((id(vars(optimizer)), key))
    guards.copies.append((optimizer.param_groups, [*optimizer.param_groups]))
    guards.hooked.append(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        guards.copies.append((group["params"], [*group["params"]]))
        guards.add_object(group, "params", group["params"])
        for key, value in group.items() if has_stepped else ():
            guards.names[id(group), key] = f"{name}.param_groups[{number}][{key!r}]"
            if isinstance(value, SCALARS):
                if (id(optimizer), number, key, None) not in free and not key.startswith("initial_"):
                    guards.add_value(group, key, value)
            elif isinstance(value, tuple):
                if any((id(optimizer), number, key, item) in free for item in range(len(value))):
                    continue
                guards.add_value(group, key, value)


def _keys(container: Any) -> Iterable[Any]:
    return container if isinstance(container, dict) else range(len(container))


def _look(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError):
        return MISSING


def _append(columns: dict[Any, Column], holder: Any, key: Any, value: Any) -> None:
    column = columns.setdefault(key, Column(key))
    column.holders.append(holder)
    column.values.append(value)
