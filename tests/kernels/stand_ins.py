"""Convolutions as the wrapper has them, and our own kernels on a computer that has no GPU."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.device import context
from millstream.engine.plan_source import compile_plan
from millstream.kernels import cudnn, launches, nodes, registry
from millstream.kernels.conv2d import channels, conv2d, conv2d_writer, split_k
from millstream.kernels.conv2d.conv2d import CONVOLVE
from millstream.kernels.depthwise import depthwise
from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE
from millstream.kernels.weights import weight_layouts, weights
from millstream.kernels.weights.weights import CONVERT
from millstream.schedule import plan_graph, plan_serial
from tests.networks import lowered

CONVOLUTION = torch.ops.aten.convolution.default


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Take every tensor for one on a GPU, and every convolution for one that cuDNN could compute."""
    monkeypatch.setattr(nodes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(nodes, "_has_triton", lambda: True)
    monkeypatch.setattr(cudnn, "_cudnn_layout", lambda *arguments: torch.channels_last)
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: None)  # stand-ins are not Triton's


def convolve_2d(*arguments, out):
    out.copy_(CONVOLVE(*arguments))


def convolve_depthwise(image, weight, relu, *options, out):
    out.copy_(CONVOLVE_DEPTHWISE(image, weight, relu, out.shape[1], *options))


def convolve_2d_together(*convolutions):
    for *arguments, out in convolutions:
        convolve_2d(*arguments, out=out)


def convolve_depthwise_together(*convolutions):
    for *arguments, out in convolutions:
        convolve_depthwise(*arguments, out=out)


def convolve_2d_partials(size, stride, padding, *factors, out):
    for (image, weight), sums in zip(factors, out, strict=True):
        shares = [each.tensor_split(len(sums), 1) for each in (image, weight)]
        for values, taps, partial in zip(*shares, sums, strict=True):
            product = torch.conv2d(values, taps, None, stride, padding)
            assert product.shape == torch.Size(size)
            partial.copy_(product.movedim(1, -1).flatten(0, 2))


def reduce_2d_partials(partials, *rests):
    for sums, (bias, addend, relu, kept, out) in zip(partials, rests, strict=True):
        total = sums.to(out.dtype).sum(0).view(out.shape[0], *out.shape[2:], -1).movedim(-1, 1)[:, :kept]
        total = total if bias is None else total + bias[:kept].view(-1, 1, 1)
        total = total if addend is None else total + addend[:, :kept]
        out[:, kept:] = 0
        out[:, :kept] = torch.relu(total) if relu else total


def convert_weight(weight, *, out):
    out.copy_(CONVERT(weight, out.shape, out.dtype))


def convert_weights_together(*conversions):
    for weight, out in conversions:
        convert_weight(weight, out=out)


def convolve(image, weight, stride, padding, dilation, groups, *, out):
    out.copy_(torch.conv2d(image, weight, None, stride, padding, dilation, groups))


def convolve_relu(image, weight, bias, stride, padding, dilation, groups):
    return torch.relu(torch.conv2d(image, weight, bias, stride, padding, dilation, groups))


#: Where programs have these kernels from.
STAND_INS = {
    convolve_2d: (conv2d_writer, split_k),
    convolve_depthwise: (depthwise,),
    convolve_2d_together: (split_k,),
    convolve_depthwise_together: (),
    convolve_2d_partials: (split_k,),
    reduce_2d_partials: (split_k,),
    convert_weight: (weights,),
    convert_weights_together: (),
    convolve: (cudnn,),
    convolve_relu: (cudnn,),
}


def use_groupings(monkeypatch, change):
    """Let families have other groupings."""
    families = [replace(each, grouping=each.grouping and change(each.grouping)) for each in registry.FAMILIES]
    monkeypatch.setattr(registry, "FAMILIES", families)


@pytest.fixture
def own_kernels(pretended_gpu, monkeypatch):
    """Let PyTorch compute in double precision what our kernels and cuDNN would; tell how often each was called.

    Partial sums stay in single precision.
    """
    called = Counter()

    def count(function):
        @functools.wraps(function)
        def counted(*arguments, **options):
            called[function.__name__] += 1
            return function(*arguments, **options)

        for module in STAND_INS[function]:
            monkeypatch.setattr(module, function.__name__, counted)
        return counted

    counted = {function: count(function) for function in STAND_INS}
    by_name = {function.__name__: stand_in for function, stand_in in counted.items()}
    use_groupings(
        monkeypatch,
        lambda grouping: grouping._replace(
            alone=by_name[grouping.alone.__name__], launches=None, together=by_name[grouping.together.__name__]
        ),
    )
    for module in (channels, weight_layouts, conv2d, depthwise):
        monkeypatch.setattr(module, "_DTYPES", (torch.double,))
    return called


def run_everywhere(model, x):
    """Compile a model of doubles as if for a GPU, and run it in one order and by plans of several streams.

    Returns:
        The program, and what each of these runs gives.
    """
    torch._dynamo.reset()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # without oneDNN Inductor does as for a GPU
        known, given, result = lowered(model, x)
        program, results = known.program, [result]
        costs = Roofline().estimate(program.graph)
        plans = [plan_serial(program.graph), plan_graph(program.graph, costs, 4, "list")]
        plans.append(plan_graph(program.graph, costs, 8, "chains"))
        for plan in plans:
            check_plan(plan)
            (result,) = compile_plan(program, plan, context=context("cpu"))(list(given))
            results.append(result)
    return program, results


def writer(**facts):
    """What computes such a convolution; ``None`` where PyTorch does."""
    (*_, node) = graph_of(**facts).nodes
    found = registry.find_writer(node)
    return found and found.function


def graph_of(
    size=(1, 32, 14, 14), outputs=32, window=(3, 3), groups=1, dtype=torch.half, dilation=1, transposed=False,
    layout=torch.channels_last, weight_layout=torch.contiguous_format, bias=False,
):  # fmt: skip
    """A graph that ends with such a convolution."""
    graph = torch.fx.Graph()
    image, weight, shift = (graph.placeholder(name) for name in ("image", "weight", "shift"))
    options = (
        [1] * len(window),
        [n // 2 * dilation for n in window],
        [dilation] * len(window),
        transposed,
        [0] * len(window),
        groups,
    )
    node = graph.call_function(CONVOLUTION, (image, weight, shift if bias else None, *options))
    with FakeTensorMode():
        image.meta["val"] = torch.empty(size, dtype=dtype).contiguous(memory_format=layout)
        value = torch.empty(outputs, size[1] // groups, *window, dtype=dtype)
        weight.meta["val"] = value.contiguous(memory_format=weight_layout)
        shift.meta["val"] = torch.empty(outputs, dtype=dtype)
        node.meta["val"] = torch.empty(size[0], outputs, *size[2:], dtype=dtype).contiguous(memory_format=layout)
    return graph
