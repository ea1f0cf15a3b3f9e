"""Long sums of few results are split among blocks, and a second kernel adds up the partial sums: split-K.

A block of ``conv2d`` computes some results from beginning to end. Where there are few results and thousands of products
for each, most of the device stands still for long. ``docs/decisions/own-kernels.md`` has the figures.

**Contract**
- The program computes what it did, up to the order in which a convolution sums: split by split, always the same.
- Partial sums lie in memory of the plan's, and what is added after the products is needed by the second kernel only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from millstream.graph import Buffer, Kernel, Role
from millstream.kernels.conv2d.conv2d import (
    Conv2d,
    convolve_2d,
    convolve_2d_partials,
    convolve_2d_together,
    launches_of_conv2d,
    partials_shape,
    reduce_2d_partials,
)
from millstream.kernels.launches import TritonLaunch
from millstream.program import KernelCall, Program, TensorLayout, Value


def split_long_sums(program: Program) -> Program:
    """Let two kernels compute convolutions of long sums and few results: partial sums, and the rest."""
    kernels: list[Kernel] = []
    calls: list[KernelCall] = []
    added: dict[str, TensorLayout] = {}
    buffers: list[Buffer] = []
    for kernel, call in zip(program.graph.kernels, program.calls, strict=True):
        convolutions = _convolutions(call)
        shape = partials_shape(_described(program, convolutions)) if convolutions else None
        if shape is None:
            kernels.append(kernel)
            calls.append(call)
            continue
        partials = Value(f"partials_{len(added)}")
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        layout = TensorLayout(shape, strides, torch.float32, _layout(program, convolutions[0][-1]).device)
        added[partials.name] = layout
        buffers.append(Buffer(partials.name, _num_bytes(layout), kernel.device, Role.TEMPORARY))
        kernels += _divide(program, kernel, convolutions, partials.name, layout)
        calls.append(KernelCall(convolve_2d_partials, _of_products(program, convolutions), {"out": partials}))
        calls.append(KernelCall(reduce_2d_partials, (partials, *map(_rest, convolutions)), {}))
    if not added:
        return program
    graph = replace(
        program.graph,
        kernels=tuple(replace(kernel, id=position) for position, kernel in enumerate(kernels)),
        buffers=(*program.graph.buffers, *buffers),
    )
    return replace(
        program,
        graph=graph,
        calls=tuple(calls),
        layouts={**program.layouts, **added},
        tensors={**program.tensors, **added},
    )


def find_split_launches(program: Program) -> Iterator[TritonLaunch]:
    """The launches of such pairs of kernels, for tensors that are not there yet."""
    for products, addition in pairwise(program.calls):
        if products.target is convolve_2d_partials:
            _, stride, padding, *factors = products.args
            convolutions = (
                (image, weight, *rest[:-1], stride, padding, rest[-1])
                for (image, weight), rest in zip(factors, addition.args[1:], strict=True)
            )
            yield from launches_of_conv2d(_described(program, convolutions))


def _num_bytes(layout: TensorLayout) -> int:
    """Return what a tensor without gaps takes."""
    return math.prod(layout.size) * layout.dtype.itemsize


def _convolutions(call: KernelCall) -> list[tuple[Any, ...]]:
    """The convolutions of a call, as ``Conv2d`` has them."""
    if call.target is convolve_2d:
        return [(*call.args, call.kwargs["out"])]
    return list(call.args) if call.target is convolve_2d_together else []


def _described(program: Program, convolutions: Iterable[Sequence[Any]]) -> list[Conv2d]:
    return [Conv2d(*program.described(each)) for each in convolutions]


def _of_products(program: Program, convolutions: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Arguments of the kernel that only sums products."""
    *_, stride, padding, out = convolutions[0]
    factors = ((image, weight) for image, weight, *_ in convolutions)
    return _layout(program, out).size, stride, padding, *factors


def _rest(convolution: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the next kernel has to know, as ``Rest`` has it: the other's image and weight may be gone by then."""
    _, _, *rest, _, _, out = convolution
    return *rest, out


def _factors(convolutions: Iterable[Sequence[Any]]) -> list[Value]:
    """Return what goes into the products."""
    return [value for image, weight, *_ in convolutions for value in (image, weight)]


def _layout(program: Program, value: Value) -> TensorLayout:
    layout = program.layout(value.name)
    assert layout is not None, f"{value.name}, which one of our convolutions uses, has a layout"
    return layout


def _divide(
    program: Program, kernel: Kernel, convolutions: Sequence[Sequence[Any]], partials: str, layout: TensorLayout
) -> tuple[Kernel, Kernel]:
    """The two kernels in place of one."""
    several = f"{len(convolutions)} × " if len(convolutions) > 1 else ""
    factors = tuple(dict.fromkeys(program.base(value.name) for value in _factors(convolutions)))
    later = {program.base(each.name) for _, _, *rest in convolutions for each in rest[:2] if isinstance(each, Value)}
    num_partial_bytes = _num_bytes(layout)
    num_factor_bytes = sum(_num_bytes(_layout(program, value)) for value in _factors(convolutions))
    products = replace(
        kernel,
        name=f"{several}{convolve_2d_partials.__name__}",
        reads=factors,
        writes=(partials,),
        parts=(),
        num_bytes=num_factor_bytes + num_partial_bytes,
        ops=kernel.ops[:1],
    )
    rest = replace(
        kernel,
        name=kernel.name.replace(convolve_2d.__name__, reduce_2d_partials.__name__),
        reads=(partials, *(name for name in kernel.reads if name in later or name not in factors)),
        num_bytes=max(kernel.num_bytes - num_factor_bytes, 0) + num_partial_bytes,
        flops=math.prod(layout.size),
        ops=kernel.ops[1:],
    )
    return products, rest
