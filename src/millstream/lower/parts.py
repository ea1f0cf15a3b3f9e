"""Long sums of few results are computed in parts side by side, which a second kernel adds up.

A block of ``dense`` computes some results from beginning to end. Where there are few results and thousands of products
for each, most of the device stands still for long. ``docs/decisions/0024`` has the figures.

**Contract**
- The program computes what it did, up to the order in which a convolution sums: parts one after the other, always in
  the same order.
- Parts lie in memory of the plan's, and what is added behind the products is needed by the second kernel only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from millstream.graph import Buffer, Kernel, Role
from millstream.lower.ahead import Launch
from millstream.lower.dense import (
    Dense,
    add_dense_parts,
    convolve_dense,
    convolve_dense_together,
    launches_of_dense,
    shape_of_parts,
    sum_dense_in_parts,
)
from millstream.lower.program import Call, Layout, Program, Value


def part_long_sums(program: Program) -> Program:
    """Let two kernels compute convolutions of long sums and few results: parts of the sums, and the rest."""
    kernels: list[Kernel] = []
    calls: list[Call] = []
    added: dict[str, Layout] = {}
    for kernel, call in zip(program.graph.kernels, program.calls, strict=True):
        convolutions = _convolutions(call)
        shape = shape_of_parts(_described(program, convolutions)) if convolutions else None
        if shape is None:
            kernels.append(kernel)
            calls.append(call)
            continue
        parts = Value(f"parts_of_{convolutions[0][-1].name}")
        (device,) = {layout.device for layout in map(program.layout, _names(convolutions)) if layout is not None}
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        added[parts.name] = Layout(shape, strides, torch.float32, device)
        kernels += _divide(program, kernel, convolutions, parts.name, added[parts.name])
        calls.append(Call(sum_dense_in_parts, _of_products(program, convolutions), {"out": parts}))
        calls.append(Call(add_dense_parts, (parts, *map(_rest, convolutions)), {}))
    if not added:
        return program
    buffers = (Buffer(name, num_bytes(layout), str(layout.device), Role.TEMPORARY) for name, layout in added.items())
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


def find_launches_in_parts(program: Program) -> Iterator[Launch]:
    """The launches of such pairs of kernels, for tensors that are not there yet."""
    for products, addition in pairwise(program.calls):
        if products.target is sum_dense_in_parts:
            _, stride, padding, *factors = products.args
            convolutions = (
                (image, weight, *rest[:-1], stride, padding, rest[-1])
                for (image, weight), rest in zip(factors, addition.args[1:], strict=True)
            )
            yield from launches_of_dense(_described(program, convolutions))


def num_bytes(layout: Layout) -> int:
    """What a tensor without gaps takes."""
    return math.prod(layout.size) * layout.dtype.itemsize


def _convolutions(call: Call) -> list[tuple[Any, ...]]:
    """The convolutions of a call, as ``Dense`` has them."""
    if call.target is convolve_dense:
        return [(*call.args, call.kwargs["out"])]
    return list(call.args) if call.target is convolve_dense_together else []


def _described(program: Program, convolutions: Iterable[Sequence[Any]]) -> list[Dense]:
    return [Dense(*program.described(each)) for each in convolutions]


def _of_products(program: Program, convolutions: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Arguments of the kernel that only sums products."""
    *_, stride, padding, out = convolutions[0]
    layout = program.layout(out.name)
    assert layout is not None
    return layout.size, stride, padding, *((image, weight) for image, weight, *_ in convolutions)


def _rest(convolution: Sequence[Any]) -> tuple[Any, ...]:
    """What the kernel behind has to know, as ``Rest`` has it: the other's image and weight may be gone by then."""
    _, _, *rest, _, _, out = convolution
    return *rest, out


def _names(convolutions: Iterable[Sequence[Any]]) -> list[str]:
    """What goes into the products."""
    return [value.name for image, weight, *_ in convolutions for value in (image, weight)]


def _divide(
    program: Program, kernel: Kernel, convolutions: Sequence[Sequence[Any]], parts: str, layout: Layout
) -> tuple[Kernel, Kernel]:
    """The two kernels in place of one."""
    several = f"{len(convolutions)} × " if len(convolutions) > 1 else ""
    factors = tuple(dict.fromkeys(map(program.base, _names(convolutions))))
    later = {program.base(each.name) for _, _, *rest in convolutions for each in rest[:2] if isinstance(each, Value)}
    num_parts_bytes = num_bytes(layout)
    num_factor_bytes = sum(num_bytes(known) for known in map(program.layout, _names(convolutions)) if known is not None)
    products = replace(
        kernel,
        name=f"{several}{sum_dense_in_parts.__name__}",
        reads=factors,
        writes=(parts,),
        parts=(),
        num_bytes=num_factor_bytes + num_parts_bytes,
        ops=kernel.ops[:1],
    )
    rest = replace(
        kernel,
        name=kernel.name.replace(convolve_dense.__name__, add_dense_parts.__name__),
        reads=(parts, *(name for name in kernel.reads if name in later or name not in factors)),
        num_bytes=max(kernel.num_bytes - num_factor_bytes, 0) + num_parts_bytes,
        flops=math.prod(layout.size),
        ops=kernel.ops[1:],
    )
    return products, rest
