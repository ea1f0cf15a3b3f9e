"""What a captured graph took for granted, checked before every replay.

Each check is an identity test on entries of dictionaries that were looked up once: some 25 ns for each tensor, where walking
``named_parameters()`` costs a microsecond.

**Contract**
- ``hold`` is true only when a new capture would record the same graph over the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream.capture import torch_private
from millstream.capture.discover import Found, Link
from millstream.capture.optimizers import NumberPlace
from millstream.capture.signature import SCALARS
from millstream.capture.state import Lifted
from millstream.capture.trace import Traced

MISSING: Any = object()


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
class Guards:
    """Conditions under which a graph may be replayed.

    Attributes:
        values: Dict or list, key, value: plain Python values, compared by type and value.
        objects: The same for objects, compared by identity.
        cells: Closure cells and their contents.
        sizes: Containers and their lengths.
        tensors: Tensors, whether they require a gradient, and their address (``tensor.data = ...`` keeps the object).
        hooked: Tensors, modules and optimizers whose hooks count.
        names: How to call an entry, by id of the holder and key.
        owned: Entries, in the same form, that hold state of the step.
        hook_count: Number of hooks ever registered, when last looked at.
        hook_state: Numbers of hooks of ``hooked``.
    """

    values: list[tuple[Any, Any, Any]] = field(default_factory=list)
    objects: list[tuple[Any, Any, Any]] = field(default_factory=list)
    cells: list[tuple[Any, Any]] = field(default_factory=list)
    sizes: list[tuple[Any, int]] = field(default_factory=list)
    tensors: list[tuple[Tensor, bool, int]] = field(default_factory=list)
    hooked: list[Any] = field(default_factory=list)
    names: dict[tuple[int, Any], str] = field(default_factory=dict)
    owned: set[tuple[int, Any]] = field(default_factory=set)
    hook_count: int = -1
    hook_state: list[int] = field(default_factory=list)

    def note_hooks(self) -> None:
        """Remember which hooks there are now."""
        self.hook_count = torch_private.count_hooks()
        self.hook_state = self._hooks()

    def hold(self) -> bool:  # noqa: C901, PLR0911 - one loop for each kind of condition: this is the hot path
        """Whether everything is as it was at capture."""
        try:
            for holder, key, value in self.values:
                now = holder[key]
                if now is not value and not (type(now) is type(value) and now == value):
                    return False
            for holder, key, value in self.objects:
                if holder[key] is not value:
                    return False
            for cell, value in self.cells:
                now = cell.cell_contents
                if now is not value and not (isinstance(value, SCALARS) and type(now) is type(value) and now == value):
                    return False
        except (KeyError, IndexError, ValueError):
            return False
        for container, size in self.sizes:
            if len(container) != size:
                return False
        for tensor, requires_grad, address in self.tensors:
            if tensor.requires_grad is not requires_grad or tensor.data_ptr() != address:
                return False
        if self.hook_count != torch_private.count_hooks():
            if self.hook_state != self._hooks():
                return False
            self.hook_count = torch_private.count_hooks()
        return True

    def broken(self) -> Break | None:
        """The first condition that does not hold."""
        for holder, key, value in [*self.values, *self.objects]:
            now = _look(holder, key)
            if now is not value and not (isinstance(value, (*SCALARS, tuple)) and type(now) is type(value) and now == value):
                name = self.names.get((id(holder), key), str(key))
                return Break(f"{name} is another than before.", holder, key, (id(holder), key) in self.owned)
        for cell, value in self.cells:
            if cell.cell_contents is not value:
                return Break(f"{self.names.get((id(cell), None), 'A closure variable')} is another than before.", cell)
        for container, size in self.sizes:
            if len(container) != size:
                return Break("A container of modules, parameters or groups has another length.", container)
        for tensor, requires_grad, address in self.tensors:
            if tensor.data_ptr() != address:
                return Break("A parameter was moved or converted.", tensor, is_final=True)
            if tensor.requires_grad is not requires_grad:
                return Break("A parameter was frozen or unfrozen.", tensor)
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
    found: Found, state: Iterable[Lifted], unused: set[int], traced: Traced, numbers: Iterable[NumberPlace]
) -> Guards:
    """Derive the conditions of a graph.

    Args:
        found: What the step reaches.
        state: The tensors that are inputs of the graph.
        unused: Ids of tensors that the graph does not use: they may be replaced.
        traced: The trace of the graph.
        numbers: Numbers that the graph reads at run time: they may change.
    """
    guards = Guards()
    for holder, key, value in traced.reads:
        guards.values.append((holder, key, value))
    for link in found.links:
        _add_link(guards, link, unused)
    for entry in state:
        for holder, key in entry.places:
            guards.objects.append((holder, key, entry.tensor))
            guards.names[id(holder), key] = entry.name
            guards.owned.add((id(holder), key))
        if isinstance(entry.tensor, nn.Parameter) or entry.tensor.requires_grad:
            guards.tensors.append((entry.tensor, entry.tensor.requires_grad, entry.tensor.data_ptr()))
            guards.hooked.append(entry.tensor)
    for name, module in found.modules:
        _add_tree(guards, name, module)
    free = {(id(place.optimizer), place.group, place.key, place.item) for place in numbers}
    stepped = set(map(id, traced.optimizers))
    for name, optimizer in found.optimizers:
        _add_optimizer(guards, name, optimizer, free, has_stepped=id(optimizer) in stepped)
    guards.note_hooks()
    return guards


def _add_link(guards: Guards, link: Link, unused: set[int]) -> None:
    if id(link.value) in unused:
        return
    guards.names[id(link.holder), link.key] = link.name
    if link.key is None:
        guards.cells.append((link.holder, link.value))
    elif isinstance(link.value, SCALARS):
        guards.values.append((link.holder, link.key, link.value))
    else:
        guards.objects.append((link.holder, link.key, link.value))


def _add_tree(guards: Guards, name: str, root: nn.Module) -> None:
    for path, module in root.named_modules():
        guards.hooked.append(module)
        for key, child in module._modules.items():
            guards.objects.append((module._modules, key, child))
            guards.names[id(module._modules), key] = f"{name}.{path}.{key}" if path else f"{name}.{key}"
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            guards.sizes.append((module._modules, len(module._modules)))
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                guards.sizes.append((hooks, len(hooks)))


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
    guards.sizes.append((optimizer.param_groups, len(optimizer.param_groups)))
    guards.hooked.append(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        guards.sizes.append((group["params"], len(group["params"])))
        guards.objects.append((group, "params", group["params"]))
        for key, value in group.items() if has_stepped else ():
            guards.names[id(group), key] = f"{name}.param_groups[{number}][{key!r}]"
            if isinstance(value, SCALARS):
                if (id(optimizer), number, key, None) not in free and not key.startswith("initial_"):
                    guards.values.append((group, key, value))
            elif isinstance(value, tuple):
                if any((id(optimizer), number, key, item) in free for item in range(len(value))):
                    continue
                guards.values.append((group, key, value))


def _look(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError):
        return MISSING
