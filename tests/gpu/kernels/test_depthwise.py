"""The kernel for small depthwise convolutions."""

import pytest
import torch
from torch import nn

from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE, convolve_depthwise
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "dilation"),
    [
        ((1, 336, 21, 21), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
        ((1, 42, 83, 83), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
        ((2, 96, 33, 35), (5, 5), (2, 2), (0, 1, 2, 1), (1, 1)),
        ((3, 17, 9, 30), (3, 5), (2, 1), (0, 0, 1, 1), (1, 2)),
        ((1, 8, 1, 1), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        ((5, 1, 12, 12), (2, 2), (3, 3), (1, 1, 0, 0), (2, 1)),
        ((1, 16, 9, 13), (2, 2), (5, 5), (0, 0, 0, 0), (1, 1)),
    ],
)
@pytest.mark.parametrize(("relu", "unread", "more"), [(False, 0, 0), (True, 0, 6), (True, 7, 0)])
def test_it_computes_what_pytorch_computes(size, window, stride, padding, dilation, relu, unread, more, dtype):
    torch.manual_seed(0)
    channels_last, channels = torch.channels_last, size[1]
    image = torch.randn(size[0], channels + unread, *size[2:], device="cuda", dtype=dtype)
    image[:, channels:] = float("nan")
    image = image.contiguous(memory_format=channels_last)
    weight = torch.randn(channels, 1, *window, device="cuda", dtype=dtype)
    options = [*stride], [*padding], [*dilation]
    exact = CONVOLVE_DEPTHWISE(image.double(), weight.double(), relu, channels + more, *options)
    out = torch.full_like(exact, float("nan"), dtype=dtype, memory_format=channels_last)
    convolve_depthwise(image, weight, relu, *options, out=out)
    networks.assert_close(out, exact.to(dtype), 2 * torch.finfo(dtype).eps)


def test_what_is_no_number_stays_so_behind_relu():
    image = torch.tensor([1.0, float("nan"), -1.0], device="cuda", dtype=torch.half).view(1, 1, 1, 3)
    out = torch.empty_like(image)
    convolve_depthwise(image, torch.ones_like(image)[..., :1], True, [1, 1], [0] * 4, [1, 1], out=out)
    torch.testing.assert_close(out, torch.relu(image), equal_nan=True)


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
    assert names_on_streams(Separable).count(f"2 × {convolve_depthwise.__name__}") == 1


class Cell(nn.Module):
    """Branches that each begin with relu and a depthwise convolution of one image, as NASNet's do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(32, 40, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(40, 40, 5, 2, groups=40, bias=False))
            for _ in range(3)
        )
        self.pool = nn.AvgPool2d(2, ceil_mode=True)

    def forward(self, x):
        y = self.first(x)
        return sum(branch(y) for branch in self.branches) + self.pool(y)


def test_a_cell_on_streams(names_on_streams):
    assert names_on_streams(Cell).count(f"3 × {convolve_depthwise.__name__} of relu") == 1
