"""Which convolutions our own kernel computes. What it computes is tested on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.lower import convolution
from millstream.lower.depthwise import MOST_OUTPUTS, convolve_depthwise

CONVOLUTION = torch.ops.aten.convolution.default


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Take every tensor for one on a GPU, and every other convolution for one of cuDNN's."""
    monkeypatch.setattr(convolution, "_on_device", lambda image: True)
    monkeypatch.setattr(convolution, "_has_triton", lambda: True)
    monkeypatch.setattr(convolution, "_cudnn_layout", lambda *arguments: torch.channels_last)


def writer(
    size=(1, 32, 14, 14), groups=32, per_group=1, outputs=32, window=(3, 3), dtype=torch.half, transposed=False,
    layout=torch.channels_last,
):  # fmt: skip
    graph = torch.fx.Graph()
    image, weight = graph.placeholder("image"), graph.placeholder("weight")
    pair = [1] * len(window)
    arguments = (image, weight, None, pair, [n // 2 for n in window], pair, transposed, [0] * len(window), groups)
    node = graph.call_function(CONVOLUTION, arguments)
    with FakeTensorMode():
        image.meta["val"] = torch.empty(size, dtype=dtype).contiguous(memory_format=layout)
        weight.meta["val"] = torch.empty(outputs, per_group, *window, dtype=dtype)
        node.meta["val"] = torch.empty(size[0], outputs, *size[2:], dtype=dtype).contiguous(memory_format=layout)
    found = convolution.find_writer(node)
    return found and found.function


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"dtype": torch.bfloat16},
        {"window": (7, 1)},
        {"size": (4, 42, 9, 9), "groups": 42, "outputs": 42},
    ],
)
def test_a_small_depthwise_convolution_is_ours(kwargs):
    assert writer(**kwargs) is convolve_depthwise


@pytest.mark.parametrize(
    "kwargs",
    [
        {"groups": 1, "per_group": 32},
        {"groups": 16, "per_group": 2},
        {"outputs": 64},
        {"dtype": torch.float32},
        {"window": (11, 11)},
        {"layout": torch.contiguous_format},
        {"transposed": True},
        {"size": (MOST_OUTPUTS // (32 * 14 * 14) + 1, 32, 14, 14)},
    ],
)
def test_another_one_is_not(kwargs):
    assert writer(**kwargs) is not convolve_depthwise


def test_one_dimension_or_three_are_not(monkeypatch):
    assert writer(size=(1, 32, 14), window=(3,), layout=torch.contiguous_format) is not convolve_depthwise
    assert writer(size=(1, 32, 4, 4, 4), window=(3, 3, 3), layout=torch.channels_last_3d) is not convolve_depthwise


def test_where_there_is_no_triton_cudnn_computes_it(monkeypatch):
    monkeypatch.setattr(convolution, "_has_triton", lambda: False)
    assert writer() is convolution.convolve
