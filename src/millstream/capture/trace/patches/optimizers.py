"""Facts about optimizers that tracing needs: traceable flags, numbers to lift, steps on the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream._torch.autograd.hooks import runs_foreach
from millstream._torch.one_thread import patched
from millstream._torch.tensors import storage_id
from millstream._torch.tracing import graph_being_traced
from millstream.capture.effects.late_values import Returned
from millstream.capture.lines import raise_refusal, told
from millstream.capture.record.location import Location, SequenceItems, SharedEntries
from millstream.capture.state.others import stand_for
from millstream.capture.trace.numbers.scalars import is_number, is_scalar, is_whole
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder
from millstream.capture.trace.recorded_effects.printed import with_subclasses
from millstream.capture.trace.request import NumberInput
from millstream.errors import CaptureError
from millstream.locks import TRACING
from millstream.passes.cleanup import storages_written_by

_TRACEABLE = {"capturable": True, "fused": False, "foreach": True}
"""Flags under which an optimizer of PyTorch reads no values.

Without ``capturable`` Adam calls ``.item()`` on its step count, and single-tensor SGD does so on the learning rate.
"""


def counts_of(optimizer: Optimizer, key: str) -> Iterator[NumberInput]:
    """Yield where ``optimizer`` counts its steps under ``key``.

    In an attribute; with parameters, all who have the same.
    """
    name = f"{type(optimizer).__name__}'s {key}"
    if is_number(vars(optimizer).get(key)):
        yield NumberInput(Location(vars(optimizer), key, name), f"{key}[0]", device_of(optimizer, 0), optimizer)
    for number, group in enumerate(optimizer.param_groups):
        alike: dict[Any, list[dict[str, Any]]] = {}
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter)
            if isinstance(entry, dict) and is_number(value := entry.get(key)):
                alike.setdefault((type(value), value), []).append(entry)
        for entries in alike.values():
            location = Location(SharedEntries(tuple(entries)), key, name)
            yield NumberInput(location, f"{key}[{number}]", device_of(optimizer, number), optimizer)


def numbers_of(optimizer: Optimizer) -> Iterator[NumberInput]:
    """All numbers among the hyperparameters of ``optimizer``."""
    for number, group in enumerate(optimizer.param_groups):
        device = device_of(optimizer, number)
        for key, value in group.items():
            location = Location(group, key, f"param_groups[{number}][{key!r}]")
            if is_number(value):
                yield NumberInput(location, f"{key}[{number}]", device, optimizer)
            elif isinstance(value, tuple | list) and key != "params":
                for item in (item for item, part in enumerate(value) if is_number(part)):
                    place = Location(SequenceItems(location), item, str(location))
                    yield NumberInput(place, f"{key}[{item}][{number}]", device, optimizer)


@contextlib.contextmanager
def traceable(optimizers: Iterable[Optimizer]) -> Iterator[list[Tensor]]:
    """For the length of the context, make ``optimizers`` take the path that reads no values. The flags are put back.

    Yields parameters whose gradients an eager step leaves alone, as its form is not that for lists.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    spared = [each for group in groups if "foreach" in group and not runs_foreach(group) for each in group["params"]]
    before = [{key: group[key] for key in _TRACEABLE if key in group} for group in groups]
    # A fused optimizer lets a GradScaler hand its scale to the kernel; unfused, it would drop it.
    fused = [optimizer for optimizer in optimizers if vars(optimizer).get("_step_supports_amp_scaling")]
    for group, flags in zip(groups, before, strict=True):
        group.update({key: _TRACEABLE[key] for key in flags})
    for optimizer in fused:
        vars(optimizer)["_step_supports_amp_scaling"] = False

    def put_back() -> None:
        for group, flags in zip(groups, before, strict=True):
            group.update(flags)
        for optimizer in fused:
            vars(optimizer)["_step_supports_amp_scaling"] = True

    with TRACING.undoing(put_back):
        yield spared


class SparedGradients:
    """Gradients as an optimizer finds them, to be put back where its form for lists writes to them in place.

    SGD's does for Nesterov's momentum, and that of no other optimizer of PyTorch.

    Args:
        parameters: Whose gradients it may write to.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._found = [(each.grad, each.grad.clone()) for each in parameters if each.grad is not None]
        self._nodes = graph_being_traced().nodes
        self._num_nodes = len(self._nodes)

    def put_back(self) -> None:
        """Undo what was written to them; of the others the graph keeps no copy."""
        written = storages_written_by([*islice(self._nodes, self._num_nodes, None)])
        for gradient, before in self._found:
            if storage_id(gradient) in written:
                gradient.copy_(before)


_Count = tuple[dict[str, Any], Tensor, Tensor]


def widen_counts(optimizer: Optimizer) -> list[_Count]:
    """Give an optimizer that steps while it is traced its step counts in double precision, where that costs little.

    What they compute of a count and of nothing else an eager optimizer computes in Python's numbers. A GPU's kernels
    compute it for each element of a parameter, so it is done there only for parameters in double precision.
    """
    counts: list[_Count] = []
    for parameter, entry in optimizer.state.items():
        is_cheap = isinstance(parameter, Tensor) and (parameter.is_cpu or parameter.dtype == torch.float64)
        count = entry.get("step") if is_cheap and isinstance(entry, dict) else None
        if isinstance(count, Tensor) and count.dim() == 0 and count.dtype == torch.float32:
            stand_for(wide := count.to(torch.float64), count)
            entry["step"] = wide
            counts.append((entry, count, wide))
    return counts


def narrow_counts(counts: Iterable[_Count]) -> None:
    """Put counts back into the tensors where they came from."""
    for entry, count, wide in counts:
        if entry.get("step") is wide:
            entry["step"] = count
            count.copy_(wide)


@contextlib.contextmanager
def schedulers_are_recorded(
    recorder: EffectRecorder, refuse: Callable[[Exception], None], meet: Callable[[Optimizer], None]
) -> Iterator[None]:
    """For the length of the context, let schedulers step after each replay, instead of now.

    Until then nobody knows the numbers that a step leaves: those of its optimizer, and its own, can be put into text
    and stored, and nothing else. A scheduler's last learning rates are those of its optimizer, which a graph reads anew
    each time.

    Args:
        recorder: Gets the calls.
        refuse: Told of what cannot be done after a replay.
        meet: Told of optimizers before they are looked at.
    """
    own: list[tuple[dict[str, Any], str, Any]] = []

    def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        optimizer = scheduler.optimizer
        meet(optimizer)
        kind = type(scheduler).__name__
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups if not is_scalar(group["lr"])):
            raise_refusal(
                refuse,
                f"The step calls {kind}.step(), which writes a learning rate that is a tensor.",
                "Call the scheduler outside of the step, after it, or make the rate a float.",
            )
        places = tuple(number.location for number in numbers_of(optimizer))
        attributes = tuple(key for key, value in vars(scheduler).items() if is_number(value))
        call = functools.partial(_step_scheduler, scheduler, places, attributes)
        number = recorder.call(call, *args, is_state=True, **kwargs)
        origin = f"a number that {kind}.step() changes in the same call"
        for part, place in enumerate(places):
            place.set(recorder.returned(number, part, is_whole(place.get()), origin))
        for part, key in enumerate(attributes, len(places)):
            own.append((vars(scheduler), key, vars(scheduler)[key]))
            vars(scheduler)[key] = recorder.returned(number, part, is_whole(vars(scheduler)[key]), origin)

    def rates_of(scheduler: LRScheduler) -> list[Any]:
        meet(scheduler.optimizer)
        return [group["lr"] for group in scheduler.optimizer.param_groups]

    with contextlib.ExitStack() as patches:
        for kind in with_subclasses(LRScheduler):
            if "step" in vars(kind):
                patches.enter_context(patched(kind, "step", step))
        patches.enter_context(patched(LRScheduler, "get_last_lr", rates_of))
        try:
            yield
        finally:
            for holder, key, value in reversed(own):
                holder[key] = value


def _step_scheduler(
    scheduler: LRScheduler, places: Sequence[Location], attributes: Sequence[str], *args: Any, **kwargs: Any
) -> list[Any]:
    """Step it; returns the numbers that it leaves."""
    scheduler.step(*args, **kwargs)
    return [*(place.get() for place in places), *(vars(scheduler).get(key) for key in attributes)]


def is_schedulers(value: Any) -> bool:
    """Return whether a number, or a tuple of numbers, is what a scheduler will have put there after the replay."""
    if isinstance(value, tuple):
        return any(map(is_schedulers, value))
    return is_scalar(value) and isinstance(value.of, Returned)


class CountsOnDevice:
    """Brings the state that optimizers keep on the host (Adam's step counts) to their parameters' device, once.

    A kernel on the host could not be part of a graph on the device. ``state_dict`` goes on to give host tensors, as the
    user knows it, and ``load_state_dict`` brings new ones, which are moved when the step is captured again.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[Optimizer, dict[str, Any], str, Tensor]] = []

    def move(self, optimizer: Optimizer) -> None:
        """Move what is on the host."""
        for parameter, entry in optimizer.state.items():
            if not isinstance(entry, dict) or not isinstance(parameter, Tensor) or parameter.device.type == "cpu":
                continue
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0:
                    self._moved.append((optimizer, entry, key, value))
                    entry[key] = value.to(parameter.device)

    def undo(self) -> None:
        """Put the tensors back that were there."""
        for _, entry, key, value in self._moved:
            entry[key] = value
        self._moved.clear()

    def settle(self) -> None:
        """Let ``state_dict`` of the optimizers give host tensors from now on."""
        for optimizer, _, key, _ in self._moved:
            known = vars(optimizer).get(_ON_DEVICE)
            if known is None:
                known = vars(optimizer)[_ON_DEVICE] = set()
                optimizer.register_state_dict_post_hook(_give_counts_on_host)
            known.add(key)


_ON_DEVICE = "_millstream_counts_on_device"
"""Attribute of an optimizer: keys of the state that was moved."""


def move_counts_to_host(optimizer: Optimizer) -> None:
    """Undo what was settled, for eager steps, which would wait for the device once for each parameter."""
    for entry in optimizer.state.values():
        for key in vars(optimizer).get(_ON_DEVICE, ()):
            if isinstance(entry, dict) and isinstance(entry.get(key), Tensor):
                entry[key] = entry[key].cpu()


def _give_counts_on_host(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    keys = vars(optimizer)[_ON_DEVICE]

    def on_host(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {
            key: value.cpu() if key in keys and isinstance(value, Tensor) else value for key, value in entry.items()
        }

    return {**state_dict, "state": {index: on_host(entry) for index, entry in state_dict["state"].items()}}


def device_of(optimizer: Optimizer, group: int) -> torch.device:
    """The device of the parameters of a group."""
    parameters = optimizer.param_groups[group]["params"]
    return parameters[0].device if parameters else torch.device("cpu")


@contextlib.contextmanager
def pretended_state(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let optimizers that have none have state inside the ``with`` block, as a first step with gradients makes it.

    Parameters, gradients and settings are what they were before, hooks are not called, and learning-rate schedulers
    count nothing.

    Raises:
        CaptureError: An optimizer cannot step by itself, as one that takes a closure.
    """
    try:
        for optimizer in optimizers:
            _make_state(optimizer)
        yield
    finally:
        for optimizer in optimizers:
            optimizer.state.clear()


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    before = [(each, each.detach().clone(), each.grad) for each in parameters]
    settings = [dict(group) for group in optimizer.param_groups]
    plain: Any = type(optimizer).step
    plain = getattr(plain, "__wrapped__", plain)  # without hooks
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each)
        plain(optimizer)
    except Exception as error:
        raise CaptureError(
            f"{type(optimizer).__name__} cannot make its state ahead of the first call ({told(error)}).",
            remedy="Call the step once.",
        ) from error
    finally:
        for each, value, gradient in before:
            each.copy_(value)
            each.grad = gradient
        for group, known in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(known)
