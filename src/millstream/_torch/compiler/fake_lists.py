"""What operators over lists return for fake tensors, found without computing each item by PyTorch's references.

For each item of a list a reference broadcasts, promotes dtypes and finds strides, which takes 0.2 ms: over a second for
an optimizer of 148 parameters. Items that are alike give a result that is like them.

Private APIs of fake tensors; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from millstream._torch.workarounds import is_off

_POINTWISE = frozenset(
    "abs add addcdiv addcmul ceil clamp_max clamp_min cos div erf exp floor lerp log maximum minimum mul neg reciprocal"
    " round rsqrt sigmoid sign sin sqrt sub tanh trunc".split()
)
"""Operators over lists, without ``_foreach_``, whose results have the dtype of floating-point operands."""

_Spec = tuple[torch.Size, torch.dtype, torch.device]


@contextlib.contextmanager
def quick_fake_lists() -> Iterator[None]:
    """Let results of pointwise operators over lists be made like their operands where these are alike.

    Other threads get the same results. ``MILLSTREAM_WITHOUT=shortcuts`` leaves it out.
    """
    checks = fake_impls.op_implementations_checks
    places = [at for at, (_, run) in enumerate(checks) if run is fake_impls.foreach_run_and_map_input_device]
    if is_off("shortcuts") or len(places) != 1:
        yield
        return
    (place,) = places
    entry: Any = checks[place]
    is_foreach, run = entry

    def run_quickly(fake_mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        specs = _specs_of_results(func, args, kwargs)
        if specs is None:
            return run(fake_mode, func, *args, **kwargs)
        if func._schema.is_mutable:
            return None
        with in_kernel_invocation_manager(fake_mode):
            empty = [torch.empty(size, dtype=dtype, device="meta") for size, dtype, _ in specs]
        return [FakeTensor(fake_mode, each, device) for each, (_, _, device) in zip(empty, specs, strict=True)]

    checks[place] = (is_foreach, run_quickly)
    try:
        yield
    finally:
        checks[place] = entry


def _specs_of_results(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Spec] | None:
    """What the results are, or for an operator in place, what it writes; ``None`` where that takes more than a look."""
    if func._schema.name.removeprefix("aten::_foreach_").removesuffix("_") not in _POINTWISE:
        return None
    is_mutable = func._schema.is_mutable
    lists: list[Sequence[Any]] = []
    scalars: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            if all(type(each) in (int, float) for each in value):
                continue
            lists.append(value)
        elif type(value) is FakeTensor and not value.dim():
            scalars.append(value)
        elif type(value) not in (int, float, bool):
            return None
    if not lists or len({len(each) for each in lists}) != 1:
        return None
    specs: list[_Spec] = []
    for items in zip(*lists, strict=True):
        found = {*map(_spec_of, items)}
        if len(found) == 2:  # maybe a number for each item, as of how often an optimizer has stepped
            found = {spec for spec in found if spec is None or len(spec[0])} if _of_one_kind(found) else found
        if len(found) != 1 or (spec := found.pop()) is None or (is_mutable and items[0].shape != spec[0]):
            return None
        specs.append(spec)
    dtypes = {dtype for _, dtype, _ in specs}
    return specs if all({each.dtype} == dtypes for each in scalars) else None


def _of_one_kind(specs: Iterable[_Spec | None]) -> bool:
    """Return whether all have one dtype and device."""
    return len({spec and spec[1:] for spec in specs}) == 1


def _spec_of(value: Any) -> _Spec | None:
    """The form of a floating-point tensor that lies in the order of its dimensions; ``None`` of anything else."""
    if type(value) is not FakeTensor or not value.dtype.is_floating_point or value.layout is not torch.strided:
        return None
    if value.constant is not None or value.real_tensor is not None:
        return None
    size, expected = value.shape, 1
    strides = value.stride()
    for number, stride in zip(reversed(size), reversed(strides), strict=True):
        if type(number) is not int or stride != expected:
            return None
        expected *= max(number, 1)
    return size, value.dtype, value.fake_device
