"""Models under PyTorch's ``fully_shard`` (FSDP2): how they are set, their parameters, and their hooks put off.

All that is private to ``torch.distributed.fsdp`` is read here. Tried on torch 2.13; torch 2.11 has the same attributes
under the names that are asked for first or second.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millstream._torch.autograd.hooks import OwnHook


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of which each process has some rows.

    Attributes:
        name: In the model.
        shape: Of the whole.
        places: Modules that have it, and its name there; several where it is shared.
    """

    name: str
    shape: torch.Size
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def tensor(self) -> Tensor:
        """What the module has between steps: a ``DTensor``."""
        module, name = self.places[0]
        return module._parameters[name]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Precision:
    """A mixed-precision policy: dtypes in which something is done, ``None`` for its own.

    Attributes:
        parameters: Of gathered parameters.
        gradients: In which they are reduced.
        outputs: Of what the module gives.
        casts_inputs: Whether what it is given is cast to that of its parameters.
    """

    parameters: torch.dtype | None
    gradients: torch.dtype | None
    outputs: torch.dtype | None
    casts_inputs: bool


class Runs(Protocol):
    """A function that runs a module in the place of FSDP's hooks."""

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def after_forward(self, module: nn.Module, output: Any) -> Any: ...


def fully_sharded_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules on which ``fully_shard`` was called, of these and what is in them, each before what is in it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return []
    found = {id(each): each for root in modules for each in root.modules() if isinstance(each, kind)}
    return [*found.values()]


def is_shard(tensor: Any) -> bool:
    """Return whether a tensor is a ``DTensor`` of which each process has some rows, along a mesh's last dimension."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or type(tensor) is not module.DTensor or type(tensor._local_tensor) is not Tensor:
        return False
    *others, last = tensor.placements
    return type(last) is module.Shard and last.dim == 0 and all(each.is_replicate() for each in others)


def local_of(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: its rows of a shard, with no gradient; another tensor itself."""
    return tensor._local_tensor if is_shard(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def with_gradient(shard: Tensor) -> Tensor:
    """This process's rows of a shard, whose gradient becomes the shard's."""
    return shard.to_local()  # type: ignore[attr-defined, no-any-return]


def replicated_like(value: Tensor, shard: Tensor) -> Tensor:
    """A tensor that all processes have alike, as what ``clip_grad_norm_`` gives of shards."""
    module = sys.modules["torch.distributed.tensor"]
    mesh = shard.device_mesh  # type: ignore[attr-defined]
    return module.DTensor.from_local(value, mesh, [module.Replicate()] * mesh.ndim, run_check=False)  # type: ignore[attr-defined, no-any-return]


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor`` that all processes have alike."""
    module = sys.modules.get("torch.distributed.tensor")
    return (
        module is not None and type(tensor) is module.DTensor and all(each.is_replicate() for each in tensor.placements)
    )


def local_of_shared(tensor: Tensor) -> Tensor:
    """Such a tensor as this process has it."""
    return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [each for each in (state._fsdp_param_group,) if each is not None]
    return list(groups)


def why_not_sharded_by_us(module: nn.Module) -> str:
    """Return why parameters of a module under ``fully_shard`` cannot be gathered in its hooks' place.

    Empty where they can.

    A matter of settings alone, so that all processes say the same.
    """
    state = _state(module)
    groups = _groups(state)
    if len(getattr(state, "_modules", (module,))) != 1:
        return "several modules in one group (fully_shard([a, b]))"
    if len(groups) > 1:
        return "several groups of parameters in one module"
    if any(getattr(each, "_compiled_call_impl", None) is not None for each in module.modules()):
        return "a block under torch.compile"
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        return "explicit prefetching (set_modules_to_forward_prefetch and its like)"
    return next(filter(None, map(_why_not_group, groups)), "")


def _why_not_group(group: Any) -> str:
    parameters = group.fsdp_params
    hooks = ("_all_gather_comm", "DefaultAllGather"), ("_reduce_scatter_comm", "DefaultReduceScatter")
    owners = [module for each in parameters for module, _ in _places(each)]
    locals_of = [each.sharded_param._local_tensor for each in parameters]
    reasons = {
        "a mesh with no dimension to shard over": type(group.mesh_info).__name__
        not in ("FSDPMeshInfo", "HSDPMeshInfo"),
        "a mesh of two dimensions without all processes": _replicas(group) is not None
        and group.mesh_info.mesh.size() != dist.get_world_size(),
        "an offload policy": type(group.offload_policy).__name__ != "OffloadPolicy",
        "a collective of its own": any(type(getattr(group, name, None)).__name__ != kind for name, kind in hooks),
        "a hook for its all-reduces": getattr(group, "_all_reduce_hook", None) is not None,
        "a factor for its gradients": getattr(group, "gradient_divide_factor", None) is not None,
        "reduce_scatter_unused_params": bool(getattr(group, "reduce_scatter_unused_params", False)),
        "tensor-parallel parameters": any(each.is_dtensor for each in parameters),
        "a shard_placement_fn": not all(is_shard(each.sharded_param) for each in parameters),
        "tensors that gather themselves, as those of float8": any(
            hasattr(each, "fsdp_pre_all_gather") for each in locals_of
        ),
        "a module that sets parameters in its own way, as nn.LSTM": any(
            type(each).__setattr__ is not nn.Module.__setattr__ for each in owners
        ),
        "parameters on meta": any(each.is_meta for each in locals_of),
        "parameters without elements": any(not each.sharded_param.numel() for each in parameters),
    }
    return next((what for what, is_there in reasons.items() if is_there), "")


def _places(parameter: Any) -> Iterator[tuple[nn.Module, str]]:
    info = parameter._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def make_ready(module: nn.Module) -> None:
    """Do what ``fully_shard`` leaves to the first forward pass; the module is that which runs it."""
    _state(module)._lazy_init()


def is_ready(module: nn.Module) -> bool:
    """Return whether the first forward pass has been."""
    return _state(module)._is_root is not None


def parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """Return those that are gathered together for a module's forward pass, frozen ones included."""
    return [
        ShardedParameter(each._param_fqn or each._module_info.param_name, each._orig_size, tuple(_places(each)))
        for group in _groups(_state(module))
        for each in group.fsdp_params
    ]


def processes_of(module: nn.Module) -> dist.ProcessGroup | None:
    """The processes that a module's parameters are divided between; ``None`` where it has none of its own."""
    groups = _groups(_state(module))
    return groups[0].mesh_info.shard_process_group if groups else None


def replicas_of(module: nn.Module) -> dist.ProcessGroup | None:
    """The processes that have the same rows of a module's parameters, on a mesh of two dimensions."""
    return next(map(_replicas, _groups(_state(module))), None)


def _replicas(group: Any) -> dist.ProcessGroup | None:
    return getattr(group.mesh_info, "replicate_process_group", None)


def model_of(module: nn.Module) -> object:
    """The same for all modules under ``fully_shard`` of one model, after its first forward pass has begun."""
    return _state(module)._state_ctx


def precision_of(module: nn.Module) -> Precision:
    """In which dtypes a module computes."""
    policy = _state(module)._mp_policy
    return Precision(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)


def gathers_again(module: nn.Module) -> bool:
    """Return whether its parameters are given back after the forward pass, and gathered again in the backward pass."""
    return any(group._reshard_after_forward for group in _groups(_state(module)))


def cast_floats(dtype: torch.dtype, values: Any) -> Any:
    """Tensors of floating-point numbers among arguments, cast as ``fully_shard`` casts them."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return _apply_to_tensors(cast, values)


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes."""
    return _state(module)._device  # type: ignore[no-any-return]


def on_device(device: torch.device, values: Any) -> Any:
    """Tensors among arguments, brought to a device."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda tensor: tensor.to(device, non_blocking=True), values)


# --- hooks ------------------------------------------------------------------------------------------------------------

LEFT_WHOLE: dict[int, weakref.ref[nn.Module]] = {}
"""By id, modules that a forward pass outside of steps may have left with whole parameters: asked for in every call."""


_put_off: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def reshard_left() -> None:
    """Give back whole parameters that forward passes outside of steps have left."""
    while LEFT_WHOLE:
        module = LEFT_WHOLE.popitem()[1]()
        for group in [] if module is None else _groups(_state(module)):
            if group.is_unsharded:
                group.reshard()


def put_hooks_off(module: nn.Module, running: Callable[[], Runs | None]) -> None:
    """Have FSDP's hooks around a module's forward pass run only where nothing of ours does.

    Args:
        module: Under ``fully_shard``.
        running: Gives what runs it in the hooks' place, or ``None``.
    """
    state = _state(module)
    before, after = state._pre_forward, state._post_forward
    if isinstance(before, OwnHook):
        return

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        ours = running()
        return before(module, args, kwargs) if ours is None else ours.before_forward(module, args, kwargs)

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        ours = running()
        if ours is not None:
            return ours.after_forward(module, output)
        LEFT_WHOLE[id(module)] = weakref.ref(module)
        return after(module, args, output)

    state._pre_forward, state._post_forward = OwnHook(before_forward), OwnHook(after_forward)
    module._forward_pre_hooks[state._pre_forward_hook_handle.id] = state._pre_forward
    module._forward_hooks[state._post_forward_hook_handle.id] = state._post_forward
    LEFT_WHOLE[id(module)] = weakref.ref(module)
    _put_off.add(module)


def any_sharded() -> bool:
    """Return whether any module's hooks have been put off."""
    return bool(_put_off)


def hooks_are_off(module: nn.Module) -> bool:
    """Return whether ``put_hooks_off`` was called for it."""
    return isinstance(_state(module)._pre_forward, OwnHook)


def set_parameter(place: tuple[nn.Module, str], tensor: Tensor) -> None:
    """Have a module compute with another tensor in a parameter's place."""
    module, name = place
    module._parameters[name] = tensor  # type: ignore[assignment]


# --- dividing a model -------------------------------------------------------------------------------------------------


def can_be_divided(module: nn.Module, name: str) -> bool:
    """Return whether ``fully_shard`` takes a parameter, and a module lets it be replaced."""
    tensor = module._parameters[name]
    if type(tensor) is not nn.Parameter or type(module).__setattr__ is not nn.Module.__setattr__:
        return False
    return tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dim() > 0 and tensor.numel() > 0


def divide(modules: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device, ignored: set[Any]) -> None:
    """Call ``fully_shard`` on modules, each before what it is in.

    Args:
        modules: Under none yet.
        group: The processes.
        device: Where the parameters are.
        ignored: Parameters that stay whole.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    for module in modules:
        fully_shard(module, mesh=mesh, ignored_params=ignored)


def divided_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This process's rows of a tensor of the whole's shape, as the shard that a parameter is; others have theirs."""
    spec, own = parameter._spec, parameter._local_tensor  # type: ignore[attr-defined]
    last = spec.mesh.ndim - 1
    rank, num_rows = spec.mesh.get_local_rank(last), -(-parameter.shape[0] // spec.mesh.size(last))
    kind = sys.modules["torch.distributed.tensor"].DTensor  # type: ignore[attr-defined]
    rows = value.detach()[rank * num_rows : rank * num_rows + own.shape[0]].to(own.device, copy=True)
    shape, stride = parameter.shape, parameter.stride()
    return kind.from_local(rows, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)  # type: ignore[no-any-return]


def whole_of(value: Any) -> Any:
    """A shard's whole, which all processes ask for at once; another value itself."""
    return value.full_tensor() if is_shard(value) else value
