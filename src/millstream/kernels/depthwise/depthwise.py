"""Depthwise convolutions of few outputs, by a kernel of our own.

cuDNN's is made for large batches; figures of both are in ``docs/decisions/own-kernels.md``. Ours also does what
stands in front: relu and a border of zeros, and reads and writes images that have more channels in memory
(``prologues``).

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from millstream.kernels.family import Grouping, NodeWriter
from millstream.kernels.launches import TritonLaunch, dependent_launch_options, pointers
from millstream.kernels.nodes import arguments_of, may_be_ours, values_of

MOST_OUTPUTS = 2_500_000
"""Beyond, the device is full, and cuDNN's kernel does more with it."""

MOST_WINDOWS = 2
"""That one launch computes: each is compiled for, and a kernel's blocks take as many registers as its largest needs."""

_RUN = 4  # pixels side by side
_TILE_RUNS = 8
_TILE_CHANNELS = 16
_NUM_WARPS = 2  # each thread has one run and two channels
_MANY_BLOCKS = 1500  # where each multiprocessor has more than it can hold, blocks of twice the runs take a tenth less
_MOST_TAPS = 81  # the loop over them is unrolled
_DTYPES = (torch.float16, torch.bfloat16)
_CHANNELS_AT_ONCE = 8  # 16 bytes of 2-byte numbers, the longest load


def is_small_depthwise(arguments: list[Any], output: Any) -> bool:
    """Return whether our kernel does what ``aten.convolution`` does for these arguments, and in less time.

    That is, if channels come last in memory, and the weight's windows one after the other.

    Args:
        arguments: The nine of ``aten.convolution``, tensors real or fake.
        output: Such a tensor as it returns.
    """
    image, weight, bias, stride, _, _, transposed, _, groups = arguments
    if bias is not None or transposed or len(stride) != 2 or groups == 1:
        return False
    return (
        image.dtype in _DTYPES
        and weight.dtype is image.dtype
        and groups == image.shape[1] == weight.shape[0]
        and math.prod(weight.shape[2:]) <= _MOST_TAPS
        and 0 < output.numel() <= MOST_OUTPUTS
        and image.numel() < 1 << 31
    )


class Depthwise(NamedTuple):
    """A depthwise convolution, what stands in front, and where its result goes. Sums are in single precision.

    Attributes:
        image: Channels last. Those after the weight's are not read.
        weight: Contiguous.
        relu: Whether to apply relu to the image.
        stride: Of the convolution.
        padding: Zeros to the left, the right, above and below of the image.
        dilation: Of the convolution.
        out: Channels last. Those after the weight's are set to zero.
    """

    image: torch.Tensor
    weight: torch.Tensor
    relu: bool
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    out: torch.Tensor

    @property
    def kind(self) -> Hashable:
        """Equal for convolutions that one launch can compute, if no more than ``MOST_WINDOWS`` differ."""
        shapes = (self.image.shape, self.weight.shape[:1], self.out.shape)
        return shapes, (self.image.dtype, self.relu, *self.stride, *self.dilation)

    @property
    def window(self) -> tuple[int, ...]:
        """What else is compiled for: its height and width, and after them the zeros above and to the left."""
        return (*self.weight.shape[2:], self.padding[2], self.padding[0])


def convolve_depthwise(*arguments: Any, out: torch.Tensor) -> None:
    """Compute what ``Depthwise`` says."""
    launch_depthwise([Depthwise(*arguments, out=out)]).run()


def convolve_depthwise_together(*convolutions: Sequence[Any]) -> None:
    """Compute what several ``Depthwise`` of one kind say, given by their parts, in one launch."""
    launch_depthwise([Depthwise(*each) for each in convolutions]).run()


def launch_depthwise(convolutions: Sequence[Depthwise]) -> TritonLaunch:
    """Return how to compute convolutions of one kind at once, those of the larger window first."""
    from millstream.kernels.depthwise.depthwise_kernel import depthwise  # Triton is there where there is a GPU

    convolutions = sorted(convolutions, key=lambda each: each.window, reverse=True)
    windows = list(dict.fromkeys(each.window for each in convolutions))
    assert len(windows) <= MOST_WINDOWS
    image, weight, relu, stride, _, dilation, out = convolutions[0]
    num_images, out_channels, out_height, out_width = out.shape
    runs_a_line = -(-out_width // _RUN)
    num_runs = num_images * out_height * runs_a_line
    grid = (-(-num_runs // _TILE_RUNS), -(-out_channels // _TILE_CHANNELS), len(convolutions))
    doubled = 2 if math.prod(grid) > _MANY_BLOCKS else 1
    grid = (-(-num_runs // (doubled * _TILE_RUNS)), *grid[1:])
    image_at_once, out_at_once = (math.gcd(each.shape[1], _CHANNELS_AT_ONCE) for each in (image, out))
    arguments = (
        pointers(each.image for each in convolutions),
        pointers(each.weight for each in convolutions),
        pointers(each.out for each in convolutions),
        num_runs,
        runs_a_line,
        *image.shape[2:],
        out_height,
        out_width,
        weight.shape[0],
        image.shape[1] // image_at_once,
        out_channels // out_at_once,
        sum(each.window == windows[0] for each in convolutions),
        *windows[0][2:],
        *windows[-1][2:],
    )
    constants = {
        "STRIDE_Y": stride[0],
        "STRIDE_X": stride[1],
        "DILATION_Y": dilation[0],
        "DILATION_X": dilation[1],
        "IS_RELU": relu,
        "IMAGE_AT_ONCE": image_at_once,
        "OUT_AT_ONCE": out_at_once,
        "WINDOWS": tuple(window[:2] for window in windows),
        "RUN": _RUN,
        "TILE_RUNS": doubled * _TILE_RUNS,
        "TILE_CHANNELS": _TILE_CHANNELS,
        **dependent_launch_options(image.device),
        "num_warps": doubled * _NUM_WARPS,
    }
    return TritonLaunch(depthwise, grid, arguments, constants)


GROUPING = Grouping(
    convolve_depthwise,
    Depthwise,
    lambda convolutions: [launch_depthwise(convolutions)],
    convolve_depthwise_together,
    most_windows=MOST_WINDOWS,
)

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define(
    "convolve_depthwise(Tensor image, Tensor weight, bool relu, int outputs, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor"
)
CONVOLVE_DEPTHWISE = torch.ops.millstream.convolve_depthwise.default


@torch.library.impl(_library, "convolve_depthwise", "CompositeExplicitAutograd")
def _convolve(image: torch.Tensor, weight: torch.Tensor, relu: bool, outputs: int, *options: Any) -> torch.Tensor:
    """Return what the operator means; programs call ``convolve_depthwise`` in its place."""
    stride, padding, dilation = options
    channels = weight.shape[0]
    image = image[:, :channels]
    image = functional.pad(torch.relu(image) if relu else image, padding)
    result = torch.conv2d(image, weight, None, stride, 0, dilation, channels)
    result = functional.pad(result, [0, 0, 0, 0, 0, outputs - channels])
    return result.contiguous(memory_format=torch.channels_last)


@torch.library.register_fake("millstream::convolve_depthwise", lib=_library)
def _(image: torch.Tensor, weight: torch.Tensor, relu: bool, outputs: int, *options: Any) -> torch.Tensor:
    return torch.empty_like(_convolve(image, weight, relu, outputs, *options))


@register_flop_formula(CONVOLVE_DEPTHWISE.overloadpacket)
def _count_flops(*shapes: Any, out_shape: list[int], **_: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(shapes[1][1:])  # and of the weight


def bind_depthwise(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a depthwise convolution, with what stands in front of it, or for a small one as it is."""
    if node.target is CONVOLVE_DEPTHWISE:
        image, weight, relu, _, *options = arguments_of(node)
        name = f"{convolve_depthwise.__name__} of relu" if relu else convolve_depthwise.__name__
        ops, arguments = (*["relu"] * relu, "convolution"), (image, weight, relu, *options)
        return NodeWriter(convolve_depthwise, arguments, name, ops=ops, last=(node, image), contiguous=(weight,))
    if node.target is not torch.ops.aten.convolution.default:
        return None
    given = values_of(node)
    if given[2] is not None or not may_be_ours(given[0]) or not is_small_depthwise(given, node.meta["val"]):
        return None
    image, weight, _, stride, padding, dilation, *_ = arguments_of(node)
    arguments = (image, weight, False, stride, [n for n in reversed(padding) for _ in range(2)], dilation)
    return NodeWriter(
        convolve_depthwise, arguments, convolve_depthwise.__name__, last=(node, image), contiguous=(weight,)
    )
