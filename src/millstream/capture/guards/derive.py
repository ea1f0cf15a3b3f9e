"""The conditions of a graph, from its trace."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.modes.switches import ASKS_PRECISION
from millstream._torch.workarounds import is_off
from millstream.capture.guards.guards import Guards
from millstream.capture.guards.recorded import add_recorded, find_borrowed
from millstream.capture.record.location import MISSING, Location
from millstream.capture.record.reads import Kind
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.discover import is_own_method
from millstream.capture.state.signature import form_of, kind_of, whole_form_of
from millstream.capture.trace.request import Request, Traced
from millstream.tree.spec import SCALARS, PlainValue, Reference, Structure, walk


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
    returned |= {id(entry.tensor) for flag in traced.flags for entry in flag.entries}
    used = {
        id(entry.tensor): entry
        for index, entry in enumerate(request.state)
        if index in traced.state or id(entry.tensor) in returned
    }
    for flag in traced.flags:
        guards.flags.add(flag, flag.name, flag.outcome)
    for index, location in traced.replaced:
        guards.expect_form(Location(location.holder, location.key, request.state[index].name), form_of)
    _add_written(guards, traced)
    _add_borrowed(guards, traced.record)
    _add_wrappers(guards, traced)
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
    for _, module in request.found.modules:
        _add_tree(guards, module, used, traced.record)
    stepped = set(map(id, traced.optimizers))
    for name, optimizer in request.found.optimizers:
        _add_optimizer(guards, name, optimizer, traced, has_stepped=id(optimizer) in stepped)
    for name, scaler in request.found.scalers:
        guards.scalers.add(scaler, value=True)
        for key, value in vars(scaler).items():
            if isinstance(value, SCALARS):
                guards.expect(Location(vars(scaler), key, f"{name}.{key}"), value)
    add_recorded(guards, request, traced, used)
    guards.settle()
    return guards


def _add_written(guards: Guards, traced: Traced) -> None:
    """Expect lists that grow to be apart, and what the step adds not to be there."""
    grown = traced.effects.grown
    for location in grown:
        guards.expect_form(location, partial(_list_apart, [each for each in grown if each != location]))
    for write in traced.effects.writes:
        is_new = not isinstance(write.location.holder, CellType) and write.location.get() is MISSING
        is_made = write.output.kind != "object" or isinstance(write.output.value, SCALARS)
        if is_made and is_new:
            guards.expect(write.location, MISSING)


def _list_apart(others: Sequence[Location], value: Any) -> Any:
    """Return what is to be so of a list that may be another in each call, beside others that may be."""
    return type(value), [each.get() is value for each in others]


def _add_borrowed(guards: Guards, record: Recorder) -> None:
    """Expect functions and classes of libraries to stay; ``MILLSTREAM_WITHOUT=patches`` leaves it out."""
    codes = {id(code) for code in record.codes}
    if not is_off("patches"):
        guards.expect_borrowed(find_borrowed(record), codes)
    if id(ASKS_PRECISION.__code__) in codes:
        guards.precisions.add(ASKS_PRECISION, "torch.get_float32_matmul_precision")


def _add_wrappers(guards: Guards, traced: Traced) -> None:
    """Expect settings of DDP to stay, which code of ours has read in its place."""
    left = {write.location for write in traced.effects.writes}
    for (_, name), wrapper in traced.wrapper_reads.items():
        held = vars(wrapper)
        if Location(held, name) in left:
            continue
        is_setting = isinstance(held.get(name), (*SCALARS, tuple)) if name in held else not hasattr(wrapper, name)
        if is_setting:
            guards.expect(Location(held, name, f"{type(wrapper).__name__}.{name}"), held.get(name, MISSING))


def _add_forms(guards: Guards, request: Request, traced: Traced, used: Container[int]) -> None:
    """Expect tensors that the graph does not read to look as they do, if the step has looked; and to be tensors."""
    replaced = {location for _, location in traced.replaced}
    watched = {id(gradient.parameter) for gradient in request.gradients}
    for entry in request.state:
        tensor = entry.tensor
        if id(tensor) in used:
            if id(tensor) in traced.asked and id(tensor) not in watched:
                guards.expect_form(Location([tensor], 0, entry.name), whole_form_of)
            continue
        is_looked_at = id(tensor) in traced.looked_at
        locations = {each for each in entry.locations if is_looked_at or traced.record.has_read(each)}
        if is_looked_at and not entry.locations:
            locations = {Location([tensor], 0, entry.name)}
        for location in locations - replaced:
            guards.expect_form(location, whole_form_of if is_looked_at else kind_of)


def expect_of_arguments(request: Request, traced: Traced) -> list[tuple[int, Callable[[Any], Any], Any]]:
    """Return what else than their shapes and dtypes the step may have read of its arguments.

    Position, form, what it was.
    """
    expected: list[tuple[int, Callable[[Any], Any], Any]] = []
    own = {id(read.owner) for read in traced.record.reads if read.kind is not Kind.TENSOR}
    for index, argument in enumerate(request.arguments):
        if id(argument) in traced.asked:
            expected.append((index, whole_form_of, whole_form_of(argument)))
        if id(argument) in own:
            expected.append((index, _given_to, _given_to(argument)))
    return expected


def _given_to(tensor: Tensor) -> dict[str, Structure]:
    """Attributes that a user has given a tensor: numbers and texts by value, others by identity."""
    own = vars(tensor)
    return {key: PlainValue(type(it), it) if isinstance(it, SCALARS) else Reference(it) for key, it in own.items()}


def _add_tree(guards: Guards, root: nn.Module, used: Container[int], record: Recorder) -> None:
    """Expect the modules of a tree to be what they are.

    Args:
        guards: What is expected.
        root: The tree's.
        used: By id, tensors that are expected to be where they are.
        record: Has which parameters and buffers the step goes through: then it matters which there are.
    """
    for module in root.modules():
        for name, holder in (("parameters", module._parameters), ("buffers", module._buffers)):
            others = {key: value for key, value in holder.items() if value is not None and id(value) not in used}
            guards.measure(f"A module's {name}", holder, is_ordered=bool(others))
            is_listed = record.has_gone_through(holder)
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
    traced: Traced,
    *,
    has_stepped: bool,
) -> None:
    has_read = traced.record.has_read
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
    if has_stepped or has_read(Location(vars(optimizer), "state")):
        guards.measure(f"{name}.state", optimizer.state)
        for parameter, entry in optimizer.state.items():
            location = Location(optimizer.state, parameter, f"{name}.state of a parameter")
            guards.expect_same(location, entry)
    for number, group in enumerate(optimizer.param_groups):
        guards.copy(f"{name}.param_groups[{number}]['params']", group["params"])
        guards.expect(Location(group, "params", f"{name}.param_groups[{number}]['params']"), group["params"])


def _may_have_children(module: nn.Module) -> bool:
    """Return whether it, or code of the user's, goes through its submodules.

    PyTorch's own layers have none to go through.
    """
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not type(module).__module__.startswith(
        "torch.nn.modules"
    )
