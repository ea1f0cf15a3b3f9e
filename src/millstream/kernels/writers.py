"""What can be done for a convolution beyond what TorchInductor asks of cuDNN.

- *Compute a small one by a kernel of our own*, see ``conv2d`` and ``depthwise``.
- *Write into memory of the plan's.* PyTorch's ``convolution`` takes no output argument, but what it calls does. With it
  a temporary can lie where the plan says, which matters on several streams: memory that an operator allocates can be
  reused only on the stream that it ran on.
- *Add the bias and apply relu on the way*, which saves a kernel of about 2 µs. On an H200 it took no longer than the
  convolution alone for 94 of 94 shapes of Inception-v3 in half precision (615 against 610 µs in all), but half as long
  again where the number of channels is no multiple of 8 (HRNet's 18).

Private PyTorch APIs, one function each; tried on torch 2.11 (CUDA).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._triton import has_triton

from millstream.kernels.conv2d.conv2d import (
    ALIGNED_CHANNELS,
    CONVOLVE,
    JOIN,
    convolve_2d,
    has_channels_last,
    is_small_conv2d,
)
from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE, convolve_depthwise, is_small_depthwise
from millstream.kernels.horizontal_fusion import FAMILIES, Own, divide
from millstream.kernels.launches import Launch
from millstream.kernels.weights.weights import CONVERT, convert_weight

_IMAGES = (4, 5)  # dimensions: batch, channels, and two or three of space


class Writer(NamedTuple):
    """What computes a node of the wrapper into memory that it is given, as ``out``.

    Attributes:
        function: It.
        arguments: What else it takes.
        name: Of the kernel.
        ops: What it computes, if the node's own origins do not tell.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    name: str
    ops: tuple[str, ...] = ()


def find_writer(node: torch.fx.Node) -> Writer | None:
    """What computes a convolution, or its weight, into memory that it is given; ``None`` where nothing does."""
    own = _find_own(node)
    if own is not None and _lies_right(own, node.meta["val"]):
        return own
    if node.target is not torch.ops.aten.convolution.default or not _is_for_cudnn(values_of(node)):
        return None
    image, weight, _, stride, padding, dilation, _, _, groups = arguments_of(node)
    return Writer(convolve, (image, weight, stride, padding, dilation, groups), str(node.target))


def find_launches(graph: torch.fx.Graph) -> Iterator[Launch]:
    """The kernels of our own that a graph of aten operators probably comes to.

    Inductor's fusion and layouts are not known yet: it is assumed that what lies equally deep here, does so in the
    program, and that memory is laid out as our kernels need it. What is wrong about that costs only time to compile.
    """
    depths = depths_of(graph)
    kernels = []
    for node in graph.nodes:
        own = _find_own(node)
        if own is not None:
            task = FAMILIES[own.function].task(*_values(own.arguments), node.meta["val"])
            need = min((depths[user] for user in node.users), default=0)
            kernels.append(Own(own.function, task, depths[node], need))
    for group in divide(kernels):
        yield from FAMILIES[kernels[group[0]].function].launches([kernels[i].task for i in group])


def depths_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The longest chain of nodes that leads to each."""
    depths: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        depths[node] = max((depths[each] + 1 for each in node.all_input_nodes), default=0)
    return depths


def _find_own(node: torch.fx.Node) -> Writer | None:
    """The kernel of our own for a node, if there is one for tensors that lie in memory as it needs them."""
    if node.target is CONVERT:
        return Writer(convert_weight, (node.args[0],), convert_weight.__name__, ("convert_weight",))
    if node.target is CONVOLVE:
        return _find_conv2d(node)
    if node.target is CONVOLVE_DEPTHWISE:
        return _find_depthwise(node)
    if node.target is not torch.ops.aten.convolution.default:
        return None
    values, output = values_of(node), node.meta["val"]
    if values[2] is not None or not may_be_ours(values[0]):
        return None
    image, weight, _, stride, padding, dilation, *_ = arguments_of(node)
    if is_small_depthwise(values, output):
        own = (image, weight, False, stride, [n for n in reversed(padding) for _ in range(2)], dilation)
        return Writer(convolve_depthwise, own, convolve_depthwise.__name__)
    if is_small_conv2d(values, output):
        own = (image, weight, None, None, False, output.shape[1], stride, padding)
        return Writer(convolve_2d, own, convolve_2d.__name__)
    return None


def _find_conv2d(node: torch.fx.Node) -> Writer:
    image, weight, bias, addend, relu, *options = arguments_of(node)
    parts = [name for name, part in {"bias": bias, "sum": addend, "relu": relu}.items() if part]
    is_product = image.meta["val"].shape[2:] == weight.meta["val"].shape[2:] == (1, 1)
    added = dict.fromkeys("relu" if part == "relu" else "add" for part in parts)
    ops = ("linear" if is_product else "convolution", *added)
    name = convolve_2d.__name__ + (f" with {' and '.join(parts)}" if parts else "")
    return Writer(convolve_2d, (image, weight, bias, addend, relu, *options), name, ops)


def _find_depthwise(node: torch.fx.Node) -> Writer:
    image, weight, relu, _, *options = arguments_of(node)
    name = f"{convolve_depthwise.__name__} of relu" if relu else convolve_depthwise.__name__
    return Writer(convolve_depthwise, (image, weight, relu, *options), name, (*["relu"] * relu, "convolution"))


def _lies_right(own: Writer, output: torch.Tensor) -> bool:
    """Whether the tensors of a kernel of our own lie in memory as it reads and writes them."""
    if own.function is convert_weight:
        return has_channels_last(output)
    image, weight, _, addend, *_ = _values(own.arguments)
    if own.function is convolve_depthwise:
        return has_channels_last(image, output) and weight.is_contiguous()
    return has_channels_last(image, weight, output) and (addend is None or has_channels_last(addend))


def find_join(node: torch.fx.Node) -> torch.fx.Node | None:
    """The concatenation of which one of our convolutions may write its part; ``None`` where there is none.

    Its parts are all of such convolutions, read by nobody else, and the whole is not handed to the caller, whose memory
    the plan does not give.
    """
    join = next(iter(node.users), None)
    if join is None or join.target is not JOIN:
        return None
    parts = join.args[0]
    if not has_channels_last(join.meta["val"]) or _is_returned(join):
        return None
    for part in parts:  # type: ignore[union-attr]
        writer = find_writer(part) if isinstance(part, torch.fx.Node) and set(part.users) == {join} else None
        if writer is None or writer.function is not convolve_2d:
            return None
    return join


def _is_returned(node: torch.fx.Node) -> bool:
    return any(user.op == "output" or (user.target is torch.as_strided and _is_returned(user)) for user in node.users)


def may_be_ours(image: torch.Tensor) -> bool:
    """Whether kernels of our own can be had where this image is."""
    return _on_device(image) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return bool(has_triton())


def values_of(node: torch.fx.Node) -> list[Any]:
    """All arguments of a convolution in order, tensors as fake ones."""
    return _values(arguments_of(node))


def _values(arguments: Sequence[Any]) -> list[Any]:
    return [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in arguments]


def _is_for_cudnn(values: list[Any]) -> bool:
    """Whether PyTorch gives a convolution to cuDNN as it is: no bias, and nothing to be copied first."""
    image, weight, bias, stride, padding, dilation, transposed, output_padding, groups = values
    if bias is not None or transposed or not _on_device(image) or image.dim() not in _IMAGES or image.numel() == 0:
        return False
    arguments = (image, weight, None, stride, padding, dilation, transposed, output_padding, groups, None)
    layout = _cudnn_layout(*arguments)
    return layout is not None and bool(image.is_contiguous(memory_format=layout))


def _on_device(image: torch.Tensor) -> bool:
    return image.is_cuda


def _cudnn_layout(image: Any, weight: Any, *arguments: Any) -> torch.memory_format | None:
    """The memory format in which PyTorch hands a convolution to cuDNN; ``None`` where it does not, or does not tell."""
    try:
        with image.fake_mode:
            backend = torch._C._select_conv_backend(image, weight, *arguments)
            if backend != torch._C._ConvBackend.Cudnn:  # pyrefly: ignore[missing-attribute]
                return None
            return torch._C._conv_determine_backend_memory_format(image, weight, backend)
    except (AttributeError, RuntimeError, TypeError):  # a version of PyTorch that does it in another way
        return None


def arguments_of(node: torch.fx.Node) -> list[Any]:
    """All arguments of a convolution in order, however they were passed."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def find_epilogue(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node] | None:
    """Tell whether a generated kernel does nothing but add a bias to a convolution's result and apply relu.

    Returns:
        The convolution, the bias and what the kernel writes, as nodes of the wrapper; or ``None``.
    """
    tensors = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
    written: list[Any] = [arg for arg, use in zip(node.args, node.target.arguments, strict=True) if use.writes]  # type: ignore[union-attr]
    convolutions = [arg for arg in tensors if arg.target is torch.ops.aten.convolution.default]
    if len(convolutions) != 1 or len(written) != 1 or len(tensors) != len({*convolutions, *written}) + 1:
        return None
    convolution, output = convolutions[0], written[0]
    bias = next(arg for arg in tensors if arg is not convolution and arg is not output)
    writer = find_writer(convolution)
    if writer is None or writer.function is not convolve or not _only_bias_and_relu(node, convolution):
        return None
    image, weight = (arg.meta["val"] for arg in arguments_of(convolution)[:2])
    values: Any = [each.meta["val"] for each in (convolution, bias, output)]
    value, shift, result = values
    aligned = weight.shape[0] % ALIGNED_CHANNELS == 0 and weight.shape[1] % ALIGNED_CHANNELS == 0
    alike = result.shape == value.shape and result.stride() == value.stride() and result.dtype == value.dtype
    half = image.dtype in (torch.float16, torch.bfloat16) and shift.dtype == image.dtype
    whole = shift.shape == (weight.shape[0],) and shift.is_contiguous()
    return (convolution, bias, output) if aligned and alike and half and whole else None


def _only_bias_and_relu(node: torch.fx.Node, convolution: torch.fx.Node) -> bool:
    """Whether a kernel computes relu of the convolution that it reads.

    Origins name everything upstream too. What the kernel has and the convolution has not is its own work; the bias
    belongs to the convolution's.
    """
    own = set(node.meta.get("origins", ())) - set(convolution.meta.get("origins", ()))
    relu = own.pop() if len(own) == 1 else None
    return (
        relu is not None
        and relu.target is torch.ops.aten.relu.default
        and relu.args[0].target is torch.ops.aten.convolution.default
        and relu.args[0] in convolution.meta["origins"]
    )


def convolve(
    image: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    *,
    out: torch.Tensor,
) -> None:
    """Do what ``aten.convolution`` does for such a convolution, into ``out``."""
    cudnn: Any = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    flags = (cudnn.benchmark, deterministic, cudnn.conv.fp32_precision == "tf32")
    torch.ops.aten.cudnn_convolution.out(image, weight, padding, stride, dilation, groups, *flags, out=out)


_refused: set[tuple[Any, ...]] = set()  # convolutions for which cuDNN has no kernel that does all at once


def convolve_relu(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """``relu(convolution(image, weight, bias, ...))``, in one kernel where cuDNN has one."""
    key = (image.shape, image.stride(), image.dtype, weight.shape, *stride, *padding, *dilation, groups)
    if key not in _refused:
        try:
            return torch.ops.aten.cudnn_convolution_relu(image, weight, bias, stride, padding, dilation, groups)
        except RuntimeError as error:
            capturing = image.is_cuda and torch.cuda.is_current_stream_capturing()
            if capturing or isinstance(error, torch.OutOfMemoryError):
                raise
            _refused.add(key)
    result = torch.ops.aten.convolution(
        image, weight, None, stride, padding, dilation, False, [0] * len(stride), groups
    )
    return result.add_(bias.view(-1, *[1] * len(stride))).relu_()
