"""The kernel for small depthwise convolutions."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from millstream.lower.depthwise import convolve_depthwise
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "dilation"),
    [
        ((1, 336, 21, 21), (5, 5), (1, 1), (2, 2), (1, 1)),
        ((1, 42, 83, 83), (7, 7), (1, 1), (3, 3), (1, 1)),
        ((2, 96, 33, 35), (5, 5), (2, 2), (0, 0), (1, 1)),
        ((3, 17, 9, 30), (3, 5), (2, 1), (1, 0), (1, 2)),
        ((1, 8, 1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
        ((5, 1, 12, 12), (2, 2), (3, 3), (0, 1), (2, 1)),
    ],
)
def test_it_computes_what_pytorch_computes(size, window, stride, padding, dilation, dtype):
    torch.manual_seed(0)
    channels_last = torch.channels_last
    image = torch.randn(size, device="cuda", dtype=dtype).contiguous(memory_format=channels_last)
    weight = torch.randn(size[1], 1, *window, device="cuda", dtype=dtype)
    exact = functional.conv2d(image.double(), weight.double(), None, stride, padding, dilation, size[1])
    out = torch.full_like(exact, float("nan"), dtype=dtype, memory_format=channels_last)
    convolve_depthwise(image, weight, [*stride], [*padding], [*dilation], size[1], out=out)
    networks.assert_close(out, exact.to(dtype), 2 * torch.finfo(dtype).eps)


class Separable(nn.Module):
    """Two branches of a depthwise and a pointwise convolution, and their sum."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, size, padding=size // 2, groups=32, bias=size == 5),
                nn.ReLU(),
                nn.Conv2d(32, 32, 1),
            )
            for size in (3, 5)
        )

    def forward(self, x):
        return sum(branch(x) for branch in self.branches)


def test_in_a_network_on_streams(names_on_streams):
    assert names_on_streams(Separable).count(convolve_depthwise.__name__) == 2
