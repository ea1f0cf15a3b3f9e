"""The conditions of a graph, from its trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.switches import ASKS_PRECISION
from millstream._torch.workarounds import is_off
from millstream.capture.guards.guards import Guards
from millstream.capture.guards.recorded import add_recorded
from millstream.capture.state.borrowed import find_borrowed
from millstream.capture.state.discover import MAX_ITEMS, defaults_of, is_own_method
from millstream.capture.state.executed import WHOLE
from millstream.capture.state.location import MISSING, Location, Shared
from millstream.capture.state.signature import form_of, kind_of, whole_form_of
from millstream.capture.step.request import Request, Traced
from millstream.tree.spec import SCALARS, Reference, Structure, Value, walk

MAX_DEPTH = 3
"""Lists and dicts in an optimizer's groups are looked into so far."""


def make_guards(
    request: Request, traced: Traced, gradients: Sequence[Tensor | None], grad_buffers: Iterable[Tensor]
) -> Guards:
    """Derive the conditions of a graph.

    Args:
        request: What was traced.
        traced: The trace.
        gradients: The gradients that the tensors of ``request.gradients`` must have.
        grad_buffers: Gradients that are inputs of the graph.
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
    for index, location in traced.replaced:
        guards.expect_form(Location(location.holder, location.key, request.state[index].name), form_of)
    lifted = {*_lifted(request)}
    _add_readings(guards, request, traced, used, lifted)
    _add_objects(guards, request, traced)
    _add_forms(guards, request, traced, used)
    for entry in used.values():
        for location in entry.locations:
            guards.expect_same(location, entry.tensor)
    gradient_of = {id(item.parameter): now for item, now in zip(request.gradients, gradients, strict=True)}
    tensors: list[Tensor] = [entry.tensor for entry in used.values() if isinstance(entry.tensor, nn.Parameter)]
    tensors += [gradient.parameter for gradient in request.gradients]
    watched = {id(tensor): tensor for tensor in tensors}
    for tensor in watched.values():
        guards.hooks.add(tensor)
    guards.watched = [*watched.values(), *grad_buffers]
    guards.gradients = [gradient_of.get(id(tensor)) for tensor in guards.watched]
    host_scalars = {id(request.state[index].tensor) for index in request.host_scalars}
    others = (entry.tensor for key, entry in used.items() if key not in watched and key not in host_scalars)
    guards.place([*guards.watched, *others])
    lists = {nn.Module.named_parameters.__code__, nn.Module.named_buffers.__code__}
    is_listed = not traced.used.names.isdisjoint(("_parameters", "_buffers"))
    is_listed |= any(code in lists for code, _ in traced.frames)
    for _, module in request.found.modules:
        _add_tree(guards, module, used, is_listed=is_listed)
    stepped = set(map(id, traced.optimizers))
    for name, optimizer in request.found.optimizers:
        _add_optimizer(guards, name, optimizer, lifted, traced, has_stepped=id(optimizer) in stepped)
    for name, scaler in request.found.scalers:
        guards.scalers.add(scaler, value=True)
        for key, value in vars(scaler).items():
            if isinstance(value, SCALARS):
                guards.expect(Location(vars(scaler), key, f"{name}.{key}"), value)
    add_recorded(guards, request, traced)
    guards.settle()
    return guards


def _add_readings(
    guards: Guards, request: Request, traced: Traced, used: Container[int], lifted: Container[Location]
) -> None:
    """Expect the Python values that the step may have read."""
    for location in dict.fromkeys(_attributes_read(traced)):
        if location not in lifted:
            guards.expect(location, location.get())
    targets, grown = traced.effects.targets, traced.effects.grown
    stored = {write.location for write in traced.effects.writes}  # and not known by a link
    groups = {id(group) for _, optimizer in request.found.optimizers for group in optimizer.param_groups}
    for location, value in traced.used.links.items():
        holder = id(location.holder)
        if holder in groups or holder in targets or location in lifted:  # see _add_optimizer
            continue
        stored.discard(location)
        if location in grown:
            guards.expect_form(location, partial(_list_apart, [each for each in grown if each != location]))
            continue
        # A tensor that the graph does not read may be another, see _add_forms.
        if not isinstance(value, Tensor) or id(value) in used:
            guards.expect(location, value)
    for write in traced.effects.writes:
        is_new = not isinstance(write.location.holder, CellType) and write.location.get() is MISSING
        is_made = write.output.kind != "object" or isinstance(write.output.value, SCALARS)
        if write.location in stored and is_made and is_new:
            guards.expect(write.location, MISSING)


def _list_apart(others: Sequence[Location], value: Any) -> Any:
    """What is to be so of a list that may be another in each call, beside others that may be."""
    return type(value), [each.get() is value for each in others]


def _add_objects(guards: Guards, request: Request, traced: Traced) -> None:
    """Expect containers to hold as much as they do, and objects, classes, functions and the environment to stay."""
    targets = traced.effects.targets
    for name, container in traced.used.watched:
        if id(container) not in targets:
            guards.measure(name, container, is_ordered=True)
    for name, attributes in (*traced.used.objects, *traced.used.namespaces):  # another may appear
        guards.measure(name, attributes)
    for (_, name), module in traced.attributes.items():
        if name in WHOLE:  # code may look for any attribute there
            guards.measure(f"{type(module).__name__}.{name}", vars(module))
    for owner in traced.used.owners.values():
        guards.pin(owner)
    guards.expect_borrowed(_find_borrowed(request, traced), {id(code) for code, _ in traced.frames})
    if any(code is ASKS_PRECISION.__code__ for code, _ in traced.frames):
        guards.precisions.add(ASKS_PRECISION, "torch.get_float32_matmul_precision")
    variables = os.environ._data  # type: ignore[attr-defined]
    for name in sorted(traced.variables):
        key = os.environ.encodekey(name)
        guards.expect(Location(variables, key, f"os.environ[{name!r}]"), variables.get(key, MISSING))


def _find_borrowed(request: Request, traced: Traced) -> dict[Location, Any]:
    """What the code that ran takes from PyTorch and Python's library; ``MILLSTREAM_WITHOUT=patches`` leaves it out."""
    if is_off("patches"):
        return {}
    modules = (module for _, root in request.found.modules for module in root.modules())
    others = (each for _, each in (*request.found.optimizers, *request.found.scalers))
    owners = (*modules, *others, *traced.used.owners.values())
    kinds = (each if isinstance(each, type) else type(each) for each in owners)
    kinds = dict.fromkeys((Tensor, nn.Parameter, *kinds))
    return find_borrowed(traced.frames, kinds, traced.used.borrowed, traced.handed_on)


def _add_forms(guards: Guards, request: Request, traced: Traced, used: Container[int]) -> None:
    """Expect tensors that the graph does not read to look as they do, if the step has looked; and to be tensors."""
    replaced = {location for _, location in traced.replaced}
    watched = {id(gradient.parameter) for gradient in request.gradients}
    registered = {
        (id(holder), name)
        for (_, name), module in traced.attributes.items()
        for holder in (module._parameters, module._buffers)
        if name in holder
    }
    linked: dict[int, list[Location]] = {}
    for location, value in traced.used.links.items():
        if isinstance(value, Tensor):
            linked.setdefault(id(value), []).append(location)
    for entry in request.state:
        tensor = entry.tensor
        if id(tensor) in used:
            if id(tensor) in traced.asked and id(tensor) not in watched:
                guards.expect_form(Location([tensor], 0, entry.name), whole_form_of)
            continue
        is_looked_at = id(tensor) in traced.looked_at
        read = (at for at in entry.locations if (id(at.holder), at.key) in registered)
        locations = {*linked.get(id(tensor), ()), *read}
        if is_looked_at:
            locations |= {*entry.locations} or {Location([tensor], 0, entry.name)}
        for location in locations - replaced:
            guards.expect_form(location, whole_form_of if is_looked_at else kind_of)


def _attributes_read(traced: Traced) -> Iterator[Location]:
    """Attributes of modules that the step has read, or looked for in vain, and that select what it does."""
    for (_, name), module in traced.attributes.items():
        for key in [*vars(module)] if name in WHOLE else [name]:
            if _selects_behaviour(module, key):
                yield Location(vars(module), key)


def _selects_behaviour(module: nn.Module, name: str) -> bool:
    """Whether to check on each call that a plain attribute of this very object is unchanged, or still absent."""
    kind, held = type(module), vars(module)
    if name == "forward" or name.startswith("__"):
        return name == "forward"
    if name in held:
        return isinstance(held[name], (*SCALARS, tuple))
    if any(name in held.get(part, ()) for part in ("_parameters", "_buffers", "_modules")):
        return False
    if not hasattr(kind, name):
        return True
    if is_own_method(kind, name):
        return True
    is_torch = kind.__module__.startswith("torch.nn.modules")
    is_default = not is_torch and name in defaults_of(kind) and name not in vars(nn.Module)
    return is_default and isinstance(getattr(kind, name), (*SCALARS, tuple))


def expect_of_arguments(request: Request, traced: Traced) -> list[tuple[int, Callable[[Any], Any], Any]]:
    """What else than their shapes and dtypes the step may have read of its arguments: position, form, what it was."""
    expected: list[tuple[int, Callable[[Any], Any], Any]] = []
    may_ask = any(not hasattr(Tensor, name) for name in traced.used.told)
    for index, argument in enumerate(request.arguments):
        if id(argument) in traced.asked:
            expected.append((index, whole_form_of, whole_form_of(argument)))
        if may_ask or not traced.used.names.isdisjoint(vars(argument)):
            expected.append((index, _given_to, _given_to(argument)))
    return expected


def _given_to(tensor: Tensor) -> dict[str, Structure]:
    """Attributes that a user has given a tensor: numbers and texts by value, others by identity."""
    own = vars(tensor)
    return {key: Value(type(it), it) if isinstance(it, SCALARS) else Reference(it) for key, it in own.items()}


def _add_tree(guards: Guards, root: nn.Module, used: Container[int], *, is_listed: bool) -> None:
    """Expect the modules of a tree to be what they are.

    Args:
        guards: What is expected.
        root: The tree's.
        used: By id, tensors that are expected to be where they are.
        is_listed: Whether the step goes through parameters or buffers: then it matters which there are.
    """
    for module in root.modules():
        for name, holder in (("parameters", module._parameters), ("buffers", module._buffers)):
            others = {key: value for key, value in holder.items() if value is not None and id(value) not in used}
            guards.measure(f"A module's {name}", holder, is_ordered=bool(others))
            for key, value in holder.items():
                if value is None or (is_listed and key in others):  # an absent bias may be given one
                    guards.expect(Location(holder, key), value)
        guards.hooks.add(module)
        guards.pin(module)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                guards.copy("A module's hooks", hooks)
        if module._modules or _may_have_children(module):
            guards.copy("A module's submodules", module._modules)
        if isinstance(module, nn.ModuleDict) and len(module._modules) > 1:
            guards.measure("A ModuleDict", module._modules, is_ordered=True)


def _add_optimizer(
    guards: Guards,
    name: str,
    optimizer: Optimizer,
    lifted: set[Location],
    traced: Traced,
    *,
    has_stepped: bool,
) -> None:
    names = traced.used.names
    for key in ("state", "param_groups"):
        guards.expect_same(Location(vars(optimizer), key, f"{name}.{key}"), vars(optimizer)[key])
    guards.copy(f"{name}.param_groups", optimizer.param_groups)
    guards.pin(optimizer)
    kind = type(optimizer)
    methods = {key for base in kind.__mro__ for key in vars(base) if is_own_method(kind, key)}
    for key in methods | {"step", "zero_grad"}:  # a function may take the method's place
        guards.expect(Location(vars(optimizer), key, f"{name}.{key}"), vars(optimizer).get(key, MISSING))
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        guards.copy(f"{name}.hooks", hooks)
    if has_stepped or "state" in names:
        guards.measure(f"{name}.state", optimizer.state)
        for parameter, entry in optimizer.state.items():
            location = Location(optimizer.state, parameter, f"{name}.state of a parameter")
            guards.expect_same(location, entry)
            if "state" in names and isinstance(entry, dict):  # which the user's code reads, and not only PyTorch's
                guards.measure(str(location), entry)
                _add_group(guards, str(location), entry, lifted | {write.location for write in traced.effects.writes})
    for number, group in enumerate(optimizer.param_groups):
        guards.copy(f"{name}.param_groups[{number}]['params']", group["params"])
        guards.expect(Location(group, "params", f"{name}.param_groups[{number}]['params']"), group["params"])
        if has_stepped or "param_groups" in names:
            _add_group(guards, f"{name}.param_groups[{number}]", group, lifted)


def _lifted(request: Request) -> Iterator[Location]:
    """Entries with numbers that a graph is given anew in each call."""
    for location in (number.location.entry for number in request.numbers):
        owners = location.holder.owners if isinstance(location.holder, Shared) else (location.holder,)
        yield from (Location(owner, location.key) for owner in owners)


def _add_group(guards: Guards, name: str, group: dict[str, Any], lifted: Container[Location]) -> None:
    """Expect what an optimizer may read of a group to be what it was, but for numbers that a graph is given anew."""
    for key, value in group.items():
        location = Location(group, key, f"{name}[{key!r}]")
        if key != "params" and location not in lifted and not isinstance(value, Tensor):
            guards.expect(location, value)
            _add_contents(guards, str(location), value, MAX_DEPTH)


def _add_contents(guards: Guards, name: str, container: Any, depth: int) -> None:
    """Expect a list or dict that an optimizer may read to hold what it holds, and so those within it."""
    if depth == 0 or not isinstance(container, list | dict) or len(container) > MAX_ITEMS:
        return
    guards.measure(name, container)
    for key in container if isinstance(container, dict) else range(len(container)):
        guards.expect(Location(container, key, f"{name}[{key!r}]"), container[key])
        _add_contents(guards, f"{name}[{key!r}]", container[key], depth - 1)


def _may_have_children(module: nn.Module) -> bool:
    """Whether it, or code of the user's, goes through its submodules: PyTorch's own layers have none to go through."""
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not type(module).__module__.startswith(
        "torch.nn.modules"
    )
