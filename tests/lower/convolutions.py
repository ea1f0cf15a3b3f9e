"""Convolutions as the wrapper has them, for those who ask what computes them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.lower import convolution

CONVOLUTION = torch.ops.aten.convolution.default


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Take every tensor for one on a GPU, and every convolution for one that cuDNN could compute."""
    monkeypatch.setattr(convolution, "_on_device", lambda image: True)
    monkeypatch.setattr(convolution, "_has_triton", lambda: True)
    monkeypatch.setattr(convolution, "_cudnn_layout", lambda *arguments: torch.channels_last)


def writer(**facts):
    """What computes such a convolution; ``None`` where PyTorch does."""
    (*_, node) = graph_of(**facts).nodes
    found = convolution.find_writer(node)
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
