"""State of a step: the user's tensors that live from call to call, lifted to inputs of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.distributed.fully_sharded import is_shard, local_of
from millstream.capture.record.location import Location
from millstream.capture.state.discover import Found, walk_parameters
from millstream.capture.state.signature import is_lazy_view
from millstream.errors import CaptureError


@dataclass(frozen=True, slots=True, eq=False)
class Lifted:
    """A tensor of the user's that the graph takes as an input and may write."""

    name: str  # for people: ``model.0.weight``, ``optimizer.exp_avg[model.0.weight]``
    tensor: Tensor  # the user's own object
    locations: list[Location]  # where the user's structures hold it
    required_grad: bool  # whether it required a gradient when it was lifted


def lift(found: Found) -> list[Lifted]:
    """List every tensor of the objects in ``found`` once, in a fixed order, with all places that hold it.

    Parameters and buffers come first, then single tensors, optimizer state and scalers. Those that cannot be lifted are
    left out: the search goes by names, so the step may never read them (see ``find_unlifted``).
    """
    return list(_State.of(found).lifted.values())


def find_unlifted(found: Found) -> dict[int, tuple[str, Tensor]]:
    """By id, tensors of the objects in ``found`` that ``lift`` leaves out since it must, and their names.

    They stay what they are while the step is traced, and it is refused where it uses one.
    """
    return _State.of(found).unlifted


def why_not_lifted(name: str, tensor: Tensor, where: str = "") -> CaptureError | None:
    """The refusal of a step that uses a tensor which cannot be lifted; ``None`` of one that can be."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not is_shard(tensor):
        return CaptureError(
            f"{name} is a {type(tensor).__name__}, a tensor subclass.",
            where=where,
            remedy="Only plain tensors and parameters can be captured.",
        )
    layout = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
    if layout is not torch.strided:
        return CaptureError(
            f"{name} has the layout {layout}.", where=where, remedy="Only dense tensors can be captured."
        )
    if is_lazy_view(tensor):
        return CaptureError(
            f"{name} is a conjugated or negated view.", where=where, remedy="Keep x.resolve_conj().resolve_neg()."
        )
    return None


class _State:
    def __init__(self) -> None:
        self.lifted: dict[int, Lifted] = {}
        self.unlifted: dict[int, tuple[str, Tensor]] = {}

    @classmethod
    def of(cls, found: Found) -> Self:
        state = cls()
        state._add_all(found)
        return state

    def _add_all(self, found: Found) -> None:
        for prefix, module in found.modules:
            for name, holder, key, tensor in walk_parameters(module, prefix):
                self.add(name, tensor, holder, key)
        for name, tensor in found.tensors:
            self.add(name, tensor)
        for prefix, optimizer in found.optimizers:
            self.add_optimizer(prefix, optimizer)
        for prefix, scaler in found.scalers:
            for key in ("_scale", "_growth_tracker"):
                self.add(f"{prefix}.{key.lstrip('_')}", vars(scaler)[key], vars(scaler), key)

    def add(self, name: str, tensor: Tensor, holder: Mapping[Any, Any] | None = None, key: Any = None) -> None:
        if not tensor.is_leaf:  # left over from an earlier call; if the step reads it, tracing says so
            return
        entry = self.lifted.get(id(tensor))
        if entry is None:
            if why_not_lifted(name, tensor) is not None:
                self.unlifted.setdefault(id(tensor), (name, tensor))
                return
            entry = self.lifted[id(tensor)] = Lifted(name, tensor, [], tensor.requires_grad)
        if holder is not None:
            entry.locations.append(Location(holder, key, name))

    def add_optimizer(self, prefix: str, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            self.add(f"{prefix}.params[{number}]", parameter)
        names = {id(parameter): f"params[{number}]" for number, parameter in enumerate(parameters)}
        for parameter, entry in optimizer.state.items():
            is_lifted = id(parameter) in self.lifted
            owner = self.lifted[id(parameter)].name if is_lifted else names.get(id(parameter), "")
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, Tensor):
                    self.add(f"{prefix}.{key}[{owner}]", value, entry, key)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    self.add(f"{prefix}.{key}[{number}]", value, group, key)
                elif isinstance(value, tuple):
                    for item in value:
                        if isinstance(item, Tensor):
                            self.add(f"{prefix}.{key}[{number}]", item)


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return where a graph over these runs.

    Where the first is that is not on the host, if one is; ``meta`` is no place.
    """
    elsewhere = (tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta))
    return next(elsewhere, torch.device("cpu"))


def find_host_scalars(state: Sequence[Lifted]) -> dict[int, torch.device]:
    """Positions of single numbers on the host among state on a device, and the device.

    A kernel on the device would read such a tensor once, when the graph is captured. The graph reads a copy on the
    device instead, which is filled whenever the number changes.
    """
    device = device_of(entry.tensor for entry in state)
    if device.type == "cpu":
        return {}
    return {
        index: device
        for index, entry in enumerate(state)
        if entry.tensor.device.type == "cpu" and entry.tensor.dim() == 0 and not entry.tensor.requires_grad
    }


def check_apart(written: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse state that lies in the same memory and is written by both names, as after ``a.data = b.data``.

    Raises:
        CaptureError: Two of ``written``, names and tensors, do.
    """
    own = [(name, local_of(tensor)) for name, tensor in written]
    ranges = sorted(
        ((tensor.device.type, tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)), name)
        for name, tensor in own
        if tensor.numel()
    )
    for ((device, _, end), name), ((other_device, start, _), other) in pairwise(ranges):
        if device == other_device and start < end:
            raise CaptureError(
                f"{name} and {other} share memory, and the step writes both.",
                remedy="Make them one parameter: a.weight = b.weight.",
            )


def _extent(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()
