"""Cheap allocation and views, as Inductor's own wrapper makes them, and what operators do with tensors.

Private APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # noqa: PLC0414 - for others to import from here
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: PLC0414
from torch.utils._python_dispatch import _disable_current_modes

_GUARDS: Any = torch._C._dynamo.guards  # where PyTorch keeps the quick functions that its generated code calls

#: ``reinterpret(base, size, stride, offset)``: a view whose offset counts from the start of ``base``; 0.3 µs against
#: 1.5 for as_strided.
reinterpret: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = _GUARDS._reinterpret_tensor


def tracked_view(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """As ``reinterpret``, but autograd takes a change of either for one of both, as it does of what it has saved.

    Without gradients, as within an autograd function.
    """
    return base.as_strided(size, stride, base.storage_offset() + offset)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3


def from_handle(handle: int) -> torch.Tensor:
    """The Python object of a C++ tensor that lies at an address, on the heap; the tensor there is moved from."""
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_new_capsule(handle, None, None))


@functools.cache
def place_of_implementation() -> int | None:
    """At which byte a Python tensor holds the pointer to its implementation; ``None`` if nowhere.

    What comes before differs from version to version.
    """
    tensor = torch.empty(())
    words = (ctypes.c_size_t * (type(tensor).__basicsize__ // ctypes.sizeof(ctypes.c_size_t))).from_address(id(tensor))
    found = [index for index, word in enumerate(words) if word == tensor._cdata]
    return found[0] * ctypes.sizeof(ctypes.c_size_t) if found else None


def noted_lengths(jagged: torch.Tensor) -> tuple[int | None, int | None]:
    """The least and the greatest length of a jagged tensor, as far as it knows them without asking the device."""
    noted = getattr(jagged, "_metadata_cache", None) or {}  # as tensors of that size, without elements
    shortest, longest = (noted[name].size(0) if name in noted else None for name in ("min_seqlen", "max_seqlen"))
    return shortest, longest


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """Return the quickest ``empty_strided(size, stride, dtype)`` for a device; on CUDA it serves the current device."""
    if device.type == "cpu":
        return _GUARDS._empty_strided_cpu
    if device.type == "cuda":
        return _GUARDS._empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def same_addresses(tensors: list[Any], addresses: list[int | None], positions: list[int]) -> bool:
    """Return whether ``tensors[i]`` lies at ``addresses[i]`` for every i in ``positions``: some 75 ns a tensor.

    Only CUDA builds of PyTorch have it.
    """
    return bool(torch._C._tensors_data_ptrs_at_indices_equal(tensors, addresses, positions))


#: Triton kernels load several elements at once where they may take it that the first one lies at a multiple of this;
#: Inductor lets them, for each input that lay so when it compiled, and calls it ``GPU_ALIGN_BYTES``.
ALIGNMENT_BYTES = 16


def realign(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` into memory of its own with the same strides, aligned as PyTorch's allocators do it."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy_elements(copy, tensor)
    return copy


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of the same sizes and strides, also where they repeat their memory."""
    storage_view(target).copy_(storage_view(source))


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` without the dimensions in which it repeats its memory, so that it can be copied into."""
    size = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(size, tensor.stride(), tensor.storage_offset())


def without_autocast() -> AbstractContextManager[Any]:
    """No operator is cast in the body, whatever autocast the caller is in. Tried on torch 2.11 and 2.13."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()  # type: ignore[attr-defined]
    return context


def real_tensors() -> AbstractContextManager[Any]:
    """For the length of the context, no mode of a trace sees what is made: it has values. Tried on 2.11 and 2.13."""
    return _disable_current_modes()


def is_real(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has values, rather than being fake or a wrapper of ``torch.func``.

    Tried on 2.11 and 2.13.
    """
    return not isinstance(tensor, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_unknown(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is fake and no constant of the program.

    Its values are not known. Tried on 2.11 and 2.13.
    """
    return isinstance(tensor, FakeTensor) and tensor.constant is None


asks_device = torch.ops.prim.device.default
"""The operator by which PyTorch's C++ code asks fake tensors, with each gradient for one, on what device they are."""


def device_of_fake(tensor: FakeTensor) -> torch.device:
    """Return what ``asks_device`` is answered, as by the mode of fake tensors itself. Tried on 2.11 and 2.13."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def storage_id(tensor: Tensor) -> int:
    """A number that is equal exactly for tensors that share memory, fake or not. Tried on 2.11 and 2.13."""
    return int(tensor.untyped_storage()._cdata)


def is_same_view(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors, fake or not, are the same part of the same memory."""
    return (
        storage_id(left) == storage_id(right)
        and left.storage_offset() == right.storage_offset()
        and left.stride() == right.stride()
    )


def has_shared_memory(tensor: Tensor) -> bool:
    """Return whether another tensor has its memory, too, or part of it. Tried on 2.11 and 2.13."""
    if tensor.layout is not torch.strided:
        return False
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)  # it, and what Python sees of it


def layout_check(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A quick look whether each of ``tensors`` has its sizes, strides and dtype still, and its demand for a gradient.

    Dynamo's own guard, 40 ns a tensor; ``stride()`` and ``shape`` take 180. Tried on 2.11 and 2.13.
    """
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return functools.partial(guards.check, *tensors)


def call_plainly(function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)`` without gradients and autocast: contexts would cost microseconds. Tried on 2.11, 2.13."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        if torch._C._is_any_autocast_enabled():
            with without_autocast():
                return function(argument)
        return function(argument)
    finally:
        torch._C._set_grad_enabled(before)


def mark_use(storage: torch.UntypedStorage, stream: Any) -> None:
    """``record_stream`` for a storage; modes do not see it."""
    hidden = torch._C._DisableTorchDispatch()
    try:
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))
        tensor.record_stream(stream)
    finally:
        del hidden


# A storage's ``_weak_ref()`` is a number; as long as it is not dropped, no other storage gets the first one's address.

is_storage_gone: Any = torch.UntypedStorage._expired
"""Whether the storage behind a weak reference has been freed."""

drop_storage_reference: Any = torch.UntypedStorage._free_weak_ref
"""Give a weak reference up."""


def storage_behind(reference: int | None) -> torch.UntypedStorage | None:
    """The storage behind a weak reference; ``None`` where it is gone."""
    return None if reference is None else torch.UntypedStorage._new_with_weak_ptr(reference)
