"""Convolutions of small images, by a kernel of our own.

cuDNN's are made for large batches: they take longer alone, and one block of them can fill a whole multiprocessor, so
that nothing runs beside them. Figures of both are in ``docs/decisions/own-kernels.md``.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import register_flop_formula

from millstream.kernels.conv2d.conv2d_tiles import (
    SPLIT_TILE,
    ceil_div,
    choose_splits,
    choose_tile,
    is_pointwise,
    num_pixels,
)
from millstream.kernels.family import Grouping
from millstream.kernels.launches import TritonLaunch, dependent_launch_options, pointers
from millstream.kernels.nodes import ALIGNED_CHANNELS

KEPT_AT_ONCE = 2  # of the channels that are wanted of a result there are a multiple of so many
_DTYPES = (torch.float16, torch.bfloat16)
_NUM_WARPS = 4
_DEPTH_OF_SUM = 64  # deeper tiles have two sums
_REDUCED_PIXELS, _REDUCED_CHANNELS = 8, 64


def is_small_conv2d(arguments: list[Any], output: Any) -> bool:
    """Return whether our kernel does what ``aten.convolution`` does for these arguments, and in less time.

    That is, if channels come last in memory (``has_channels_last``), and but for a bias.

    Args:
        arguments: The nine of ``aten.convolution``, tensors real or fake.
        output: Such a tensor as it returns.
    """
    image, weight, _, stride, padding, dilation, transposed, _, groups = arguments
    if transposed or len(stride) != 2 or groups != 1 or image.dim() != 4:
        return False
    return (
        image.dtype in _DTYPES
        and weight.dtype is image.dtype
        and all(step == 1 for step in dilation)
        and all(channels % ALIGNED_CHANNELS == 0 for channels in weight.shape[:2])
        and output.numel() > 0
        and all(tensor.numel() < 1 << 31 for tensor in (image, weight, output))
        and choose_tile(weight, output, stride, padding) is not None
    )


class Rest(NamedTuple):
    """What is done with the sums of products, and where the result goes: as of ``Conv2d``."""

    bias: torch.Tensor | None
    addend: torch.Tensor | None
    relu: bool
    kept: int
    out: torch.Tensor


class Conv2d(NamedTuple):
    """A convolution, what follows it, and where its result goes. Sums are in single precision, and rounded once.

    Attributes:
        image: Of the convolution, channels last.
        weight: Likewise.
        bias: Of the first ``kept`` channels, if not of all. One of a wider type is rounded first.
        addend: Of the size of ``out``, but for its channels, which are as many as are kept or more; channels last.
        relu: Whether to apply relu to the sum of all.
        kept: How many channels of the result are computed. The others are set to zero.
        stride: Of the convolution.
        padding: Of the convolution.
        out: Channels last; there may be others between its own, in multiples of eight.
    """

    image: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    addend: torch.Tensor | None
    relu: bool
    kept: int
    stride: list[int]
    padding: list[int]
    out: torch.Tensor

    window = ()
    """What else is compiled for, where a launch computes several: nothing."""

    @property
    def rest(self) -> Rest:
        """What comes after the products."""
        return Rest(self.bias, self.addend, self.relu, self.kept, self.out)

    @property
    def kind(self) -> Hashable:
        """Equal for convolutions that one launch can compute."""
        shapes = (self.image.shape, self.weight.shape, self.out.shape, _channels_between_pixels(self.out))
        bias = None if self.bias is None else self.bias.dtype
        options = (self.image.dtype, bias, self.relu, self.kept, *self.stride, *self.padding)
        # One without an addend adds nothing to those that have one.
        return shapes, options


def convolve_2d(*arguments: Any, out: torch.Tensor) -> None:
    """Compute what ``Conv2d`` says."""
    launch_conv2d([Conv2d(*arguments, out=out)]).run()


def convolve_2d_together(*convolutions: Sequence[Any]) -> None:
    """Compute what several ``Conv2d`` of one kind say, given by their parts, in one launch."""
    launch_conv2d([Conv2d(*each) for each in convolutions]).run()


def convolve_2d_partials(
    size: Sequence[int], stride: list[int], padding: list[int], *factors: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum products of images with weights, split, for results of one size, into ``out`` of ``partials_shape``."""
    launch_partials(size, stride, padding, factors, out).run()


def reduce_2d_partials(partials: torch.Tensor, *rests: Sequence[Any]) -> None:
    """Add up what ``convolve_2d_partials`` has left, and do the ``Rest`` for each convolution."""
    launch_reduction(partials, [Rest(*each) for each in rests]).run()


def launches_of_conv2d(convolutions: Sequence[Conv2d]) -> list[TritonLaunch]:
    """All that is launched to compute convolutions of one kind at once, for partial sums that are not there yet."""
    shape = partials_shape(convolutions)
    if shape is None:
        return [launch_conv2d(convolutions)]
    image, _, *_, stride, padding, out = convolutions[0]
    with FakeTensorMode():
        partials = torch.empty(shape, device=image.device)
        products = launch_partials(out.shape, stride, padding, [each[:2] for each in convolutions], partials)
        return [products, launch_reduction(partials, [each.rest for each in convolutions])]


GROUPING = Grouping(convolve_2d, Conv2d, launches_of_conv2d, convolve_2d_together)


def partials_shape(convolutions: Sequence[Conv2d]) -> tuple[int, int, int, int] | None:
    """Return how many convolutions, splits, pixels and channels there are; ``None`` where sums stay whole."""
    out = convolutions[0].out
    num_splits = choose_splits(convolutions[0].weight, out)
    return (len(convolutions), num_splits, num_pixels(out), out.shape[1]) if num_splits > 1 else None


def launch_partials(
    size: Sequence[int],
    stride: list[int],
    padding: list[int],
    factors: Sequence[Sequence[torch.Tensor]],
    partials: torch.Tensor,
) -> TritonLaunch:
    """Return how to compute partial sums, those of each split like a result of this size."""
    shape = (size[0], *size[2:], size[1])
    firsts = [partial.view(shape).movedim(-1, 1) for partial in partials[:, 0]]
    convolutions = [
        Conv2d(image, weight, None, None, False, size[1], stride, padding, first)
        for (image, weight), first in zip(factors, firsts, strict=True)
    ]
    return launch_conv2d(convolutions, partials.shape[1])


def launch_conv2d(convolutions: Sequence[Conv2d], num_splits: int = 1) -> TritonLaunch:
    """Return how to compute convolutions of one kind at once.

    Args:
        convolutions: Where sums are split, each has the place of its first split for ``out``, and nothing follows.
        num_splits: Of each sum.
    """
    from millstream.kernels.conv2d.conv2d_kernel import conv2d  # Triton is there where there is a GPU

    convolutions = sorted(convolutions, key=lambda each: each.addend is None)
    image, weight, *_, stride, padding, out = convolutions[0]
    tile = choose_tile(weight, out, stride, padding, len(convolutions)) if num_splits == 1 else SPLIT_TILE
    assert tile is not None
    outputs, inputs, rows, columns = weight.shape
    pixels, row = num_pixels(out), inputs * columns
    steps_a_row = ceil_div(row, tile.depth)
    steps = rows * steps_a_row
    tensors, numbers, has_addend = _describe([each.rest for each in convolutions])
    arguments = (
        pointers(each.image for each in convolutions),
        pointers(each.weight for each in convolutions),
        *tensors,
        pixels,
        *image.shape[2:],
        *out.shape[2:],
        inputs // ALIGNED_CHANNELS,
        outputs // ALIGNED_CHANNELS,
        *numbers,
        row // ALIGNED_CHANNELS,
        rows,
        *padding,
        *stride,
        steps,
        steps_a_row,
        ceil_div(steps, num_splits),
        num_splits,
    )
    constants = {
        "IS_POINTWISE": is_pointwise(weight, stride, padding),
        "IS_WHOLE": row % tile.depth == 0,
        "HAS_ADDEND": has_addend,
        "AT_ONCE": ALIGNED_CHANNELS,
        "KEPT_AT_ONCE": KEPT_AT_ONCE,
        "TILE_PIXELS": tile.pixels,
        "TILE_CHANNELS": tile.channels,
        "TILE_DEPTH": tile.depth,
        "IS_HALVED": tile.depth > _DEPTH_OF_SUM,
        "IS_SPLIT": num_splits > 1,
        **dependent_launch_options(image.device),
        "num_warps": _NUM_WARPS,
        "num_stages": tile.stages,
    }
    grid = (ceil_div(pixels, tile.pixels), ceil_div(outputs, tile.channels), len(convolutions) * num_splits)
    return TritonLaunch(conv2d, grid, arguments, constants)


def launch_reduction(partials: torch.Tensor, rests: Sequence[Rest]) -> TritonLaunch:
    """Return how to add up partial sums, and to do what follows."""
    # Triton is there where there is a GPU
    from millstream.kernels.conv2d.conv2d_kernel import reduce_partials

    pairs = sorted(zip(rests, partials, strict=True), key=lambda pair: pair[0].addend is None)
    rests = [rest for rest, _ in pairs]
    outputs, pixels = rests[0].out.shape[1], num_pixels(rests[0].out)
    tensors, numbers, has_addend = _describe(rests)
    arguments = (pointers(partial for _, partial in pairs), *tensors, pixels, outputs // ALIGNED_CHANNELS, *numbers)
    constants = {
        "NUM_SPLITS": partials.shape[1],
        "HAS_ADDEND": has_addend,
        "AT_ONCE": ALIGNED_CHANNELS,
        "KEPT_AT_ONCE": KEPT_AT_ONCE,
        "TILE_PIXELS": _REDUCED_PIXELS,
        "TILE_CHANNELS": _REDUCED_CHANNELS,
        **dependent_launch_options(partials.device),
        "num_warps": _NUM_WARPS,
    }
    grid = (ceil_div(pixels, _REDUCED_PIXELS), ceil_div(outputs, _REDUCED_CHANNELS), len(rests))
    return TritonLaunch(reduce_partials, grid, arguments, constants)


def _describe(rests: Sequence[Rest]) -> tuple[tuple[Any, ...], tuple[Any, ...], bool]:
    """Tensors and numbers that tell a kernel what follows the products, and whether anything is added.

    Those with an addend come first. Where there is nothing, some tensor of the result's type stands.
    """
    first = rests[0]
    addends = [each.addend for each in rests if each.addend is not None]
    tensors = (
        pointers(each.out if each.bias is None else each.bias for each in rests),
        pointers(each.out if each.addend is None else each.addend for each in rests),
        pointers(each.out for each in rests),
    )
    numbers = (
        _channels_between_pixels(first.out) // ALIGNED_CHANNELS,
        first.kept // KEPT_AT_ONCE,
        0 if first.bias is None else first.kept // KEPT_AT_ONCE,
        addends[0].shape[1] // ALIGNED_CHANNELS if addends else 0,
        len(addends),
        0.0 if first.relu else -math.inf,
    )
    return tensors, numbers, bool(addends)


def _channels_between_pixels(out: torch.Tensor) -> int:
    """Return how many numbers lie between a pixel of an image and the next."""
    steps = [out.stride(i) for i in (3, 2, 0) if out.shape[i] > 1]
    return steps[0] if steps else out.shape[1]


_library = torch.library.Library("millstream", "DEF")
_library.define(
    "convolve_2d(Tensor image, Tensor weight, Tensor? bias, Tensor? addend, bool relu, int kept, int[] stride, "
    "int[] padding) -> Tensor"
)
CONVOLVE = torch.ops.millstream.convolve_2d.default


@torch.library.impl(_library, "convolve_2d", "CompositeExplicitAutograd")
def _convolve(image: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return what the operator means; programs call ``convolve_2d`` in its place."""
    bias, addend, relu, kept, stride, padding = options
    convolved = torch.conv2d(image, weight, None, stride, padding)
    result = convolved[:, :kept].clone()
    result = result if bias is None else result + bias[:kept].to(result.dtype).view(-1, 1, 1)
    result = result if addend is None else result + addend[:, :kept]
    result = torch.relu(result) if relu else result
    return convolved.zero_().index_copy_(1, torch.arange(kept, device=result.device), result)


@torch.library.register_fake("millstream::convolve_2d", lib=_library)
def _(image: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.empty_like(torch.conv2d(image, weight, None, *options[-2:]))  # with the same strides


_library.define("join_channels(Tensor[] parts) -> Tensor")
JOIN = torch.ops.millstream.join_channels.default


@torch.library.impl(_library, "join_channels", "CompositeExplicitAutograd")
def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Results of convolutions, one's channels after another's. Programs let these write there, and call nothing."""
    return torch.cat(parts, 1)


@torch.library.register_fake("millstream::join_channels", lib=_library)
def _(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, 1)


@register_flop_formula(CONVOLVE.overloadpacket)
def _count_flops(*shapes: Any, out_shape: list[int], **_: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(shapes[1][1:])  # and of the weight
