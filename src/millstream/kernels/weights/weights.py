"""Weights of convolutions with their channels last, by a kernel of our own.

PyTorch's models have channels first, so that each call copies each weight, and Inductor makes a kernel of each: they
were 305 of HRNet-W18's 672. Ours converts several in one launch (``horizontal_fusion``), and does what else makes a
weight ready: zeros for channels that are added (``channels``), and another type. See ``docs/decisions/own-kernels.md``.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from millstream.graph import KernelKind
from millstream.kernels.conv2d.conv2d_tiles import ceil_div
from millstream.kernels.family import Grouping, NodeWriter
from millstream.kernels.launches import TritonLaunch, dependent_launch_options, pointers

_CHANNELS_AT_ONCE = 8  # 16 bytes of 2-byte numbers, the longest store
_TILE = 4096  # numbers
_TILE_INPUTS = (16, 32, 64)  # channels of the image: what is written begins and ends with sectors of 32 bytes
_MOST_TAPS = 16  # of a tile; of larger windows several follow each other
_NUM_WARPS = 4


class Conversion(NamedTuple):
    """A weight and where it goes.

    Attributes:
        weight: Of a convolution, contiguous or with its channels last.
        out: Channels last, of as many channels or more, in both directions. Those after the weight's are set to zero.
    """

    weight: torch.Tensor
    out: torch.Tensor

    @property
    def kind(self) -> Hashable:
        """Equal for weights that one launch can convert."""
        is_last = not self.weight.is_contiguous()
        return self.weight.dtype, self.out.dtype, is_last, _num_taps(self.weight), self.weight.shape == self.out.shape


def convert_weight(weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """Do what ``Conversion`` says."""
    launch_conversions([Conversion(weight, out)]).run()


def convert_weights_together(*conversions: Sequence[torch.Tensor]) -> None:
    """Do what several ``Conversion`` of one kind say, given by their parts, in one launch."""
    launch_conversions([Conversion(*each) for each in conversions]).run()


def launch_conversions(conversions: Sequence[Conversion]) -> TritonLaunch:
    """Return how to convert weights of one kind at once."""
    from millstream.kernels.weights.weights_kernel import convert  # Triton is there where there is a GPU

    weights, outs = zip(*conversions, strict=True)
    num_taps = _num_taps(weights[0])
    tile_taps = min(1 << (num_taps - 1).bit_length(), _MOST_TAPS)
    tile_inputs = _choose_width(outs)
    tile_outputs = _TILE // (tile_taps * tile_inputs)
    at_once = math.gcd(_CHANNELS_AT_ONCE, *(out.shape[1] for out in outs))
    num_tiles = (ceil_div(out.shape[0], tile_outputs) * ceil_div(out.shape[1], tile_inputs) for out in outs)
    firsts = [0, *accumulate(num_tiles)]
    arguments = (
        pointers(weights),
        pointers(outs),
        _numbers(firsts[:-1], beyond=firsts[-1]),
        _numbers(weight.shape[0] for weight in weights),
        _numbers(weight.shape[1] for weight in weights),
        _numbers(out.shape[0] for out in outs),
        _numbers(out.shape[1] // at_once for out in outs),
    )
    constants = {
        "NUM_TAPS": num_taps,
        "IS_LAST": not weights[0].is_contiguous(),
        "IS_WIDENED": weights[0].shape != outs[0].shape,
        "AT_ONCE": at_once,
        "TILE_OUTPUTS": tile_outputs,
        "TILE_INPUTS": tile_inputs,
        "TILE_TAPS": tile_taps,
        **dependent_launch_options(weights[0].device),
        "num_warps": _NUM_WARPS,
    }
    return TritonLaunch(convert, (firsts[-1], 1, 1), arguments, constants)


GROUPING = Grouping(
    convert_weight,
    Conversion,
    lambda conversions: [launch_conversions(conversions)],
    convert_weights_together,
    is_by_need=True,
)


def _choose_width(outs: Sequence[torch.Tensor]) -> int:
    """Of tiles: as large as may be where the least lies beyond channels."""
    return min(reversed(_TILE_INPUTS), key=lambda width: sum(-out.shape[1] % width * out.shape[0] for out in outs))


def _num_taps(weight: torch.Tensor) -> int:
    """Of its window."""
    return math.prod(weight.shape[2:])


def _numbers(values: Iterable[int], beyond: int = 0) -> tuple[int, ...]:
    """Numbers as one argument, as many as ``pointers`` of so many tensors, for which nothing is compiled.

    Triton compiles for numbers in tuples that are one or multiples of 16; so the kernel is given other ones, and takes
    their halves.
    """
    given = [2 * value + 3 for value in values]
    return (*given, *[2 * beyond + 3] * ((1 << (len(given) - 1).bit_length()) - len(given)))


_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("convert_weight(Tensor weight, int[] size, ScalarType dtype) -> Tensor")
CONVERT = torch.ops.millstream.convert_weight.default


@torch.library.impl(_library, "convert_weight", "CompositeExplicitAutograd")
def _convert(weight: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what the operator means; programs call ``convert_weight`` in its place."""
    result = torch.zeros(size, dtype=dtype, device=weight.device).contiguous(memory_format=torch.channels_last)
    result[: weight.shape[0], : weight.shape[1]] = weight
    return result


@torch.library.register_fake("millstream::convert_weight", lib=_library)
def _(weight: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=weight.device, memory_format=torch.channels_last)


def bind_weight(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a weight that is made ready."""
    if node.target is not CONVERT:
        return None
    name = convert_weight.__name__
    return NodeWriter(convert_weight, (node.args[0],), name, KernelKind.COPY, (name,), last=(node,))
