"""Convolutions that take on bias and relu: only where the kernel after them does nothing else."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.kernels import cudnn, nodes
from millstream.lower.inductor.generated_kernels import GeneratedKernel, KernelArgument
from millstream.lower.translation.translate import translate

CONVOLUTION, RELU = torch.ops.aten.convolution.default, torch.ops.aten.relu.default
IN_PLACE = (KernelArgument("in_out_ptr0", True, True), KernelArgument("in_ptr0", True, False))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Take every convolution for one that cuDNN computes."""
    monkeypatch.setattr(cudnn, "_cudnn_layout", lambda *arguments: torch.contiguous_format)
    monkeypatch.setattr(nodes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(nodes, "_has_triton", lambda: False)


def wrapper(channels=16, dtype=torch.half, then=RELU, reader_between=False):
    """What Inductor's wrapper looks like for relu(convolution(x, w, b)): a convolution, and a kernel in place."""
    aten = torch.fx.Graph()
    x, w, b = (aten.placeholder(name) for name in "xwb")
    own = aten.call_function(CONVOLUTION, (x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    last = aten.call_function(then, (own,))
    graph = torch.fx.Graph()
    image, weight, bias = (graph.placeholder(name) for name in ("image", "weight", "bias"))
    result = graph.call_function(CONVOLUTION, (image, weight), {
        "bias": None, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1),
        "transposed": False, "output_padding": (0, 0), "groups": 1,
    })  # fmt: skip
    outputs = [result]
    if reader_between:
        outputs.append(graph.call_function(torch.ops.aten.neg.default, (result,)))
    kernel = GeneratedKernel("triton_relu", lambda *args: None, "", IN_PLACE)
    fused = graph.call_function(kernel, (result, bias))
    graph.output(outputs)
    with FakeTensorMode():
        image.meta["val"] = torch.empty(2, 8, 5, 5, dtype=dtype)
        weight.meta["val"] = torch.empty(channels, 8, 3, 3, dtype=dtype)
        bias.meta["val"] = torch.empty(channels, dtype=dtype)
        result.meta["val"] = torch.empty(2, channels, 5, 5, dtype=dtype)
    for node in outputs[1:]:
        node.meta["val"] = result.meta["val"]
    result.meta["origins"], fused.meta["origins"] = (own,), (own, last)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def kernels(**kwargs):
    return translate(wrapper(**kwargs), name="test").graph.kernels


def test_bias_and_relu_are_taken_on():
    (kernel,) = kernels()
    assert kernel.name.endswith("with bias and relu")
    assert kernel.reads == ("image", "weight", "bias")
    assert kernel.writes == kernel.allocates


@pytest.mark.parametrize(
    "kwargs",
    [
        {"then": torch.ops.aten.sigmoid.default},
        {"channels": 18},
        {"dtype": torch.float32},
        {"reader_between": True},
    ],
)
def test_anything_else_stays_apart(kwargs):
    found = kernels(**kwargs)
    assert found[-1].name == "triton_relu"
    assert not found[0].allocates, "it still writes into memory of the plan's"


def test_where_cudnn_has_no_such_kernel_the_numbers_are_the_same():
    image, weight, bias = torch.randn(2, 8, 5, 5), torch.randn(16, 8, 3, 3), torch.randn(16)
    got = cudnn.convolve_relu(image, weight, bias, [1, 1], [1, 1], [1, 1], 1)
    torch.testing.assert_close(got, torch.relu(torch.conv2d(image, weight, bias, padding=1)))
