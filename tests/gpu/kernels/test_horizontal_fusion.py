"""Several convolutions in one launch."""

import pytest
import torch
from torch import nn

from millstream.kernels.conv2d.conv2d import CONVOLVE, convolve_2d_together
from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE, convolve_depthwise, convolve_depthwise_together
from tests import networks

pytestmark = pytest.mark.gpu

EPS = 2 * torch.finfo(torch.half).eps


def rand(*size):
    return torch.randn(size, device="cuda", dtype=torch.half).contiguous(memory_format=torch.channels_last)


def spoilt(*size):
    return torch.full_like(rand(*size), float("nan"))


@pytest.mark.parametrize("number", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("size", "outputs", "window", "stride", "kept"),
    [
        ((1, 168, 42, 42), 168, 1, 1, 168),
        ((1, 672, 11, 11), 672, 1, 1, 672),
        ((2, 24, 15, 14), 40, 3, 2, 36),
        ((1, 2016, 21, 21), 336, 1, 1, 336),
    ],
)
def test_each_is_computed_by_itself(size, outputs, window, stride, kept, number):
    torch.manual_seed(0)
    options = (number % 2 == 0, kept, [stride] * 2, [window // 2] * 2)
    rows, columns = ((n - 1) // stride + 1 for n in size[2:])
    convolutions = [
        (
            rand(*size),
            rand(outputs, size[1], window, window) / (size[1] * window**2) ** 0.5,
            rand(kept, 1, 1, 1).flatten(),
            rand(size[0], outputs, rows, columns) if i in (1, 2) else None,
            *options,
            spoilt(size[0], outputs, rows, columns),
        )
        for i in range(number)
    ]
    convolve_2d_together(*convolutions)
    for image, weight, bias, addend, *options, out in convolutions:
        exact = [each if each is None else each.double() for each in (image, weight, bias, addend)]
        networks.assert_close(out, CONVOLVE(*exact, *options).half(), EPS)


@pytest.mark.parametrize("windows", [[3, 3], [3, 5, 3], [5, 3, 5, 3, 3], [3] * 8])
@pytest.mark.parametrize(("size", "stride"), [((1, 168, 42, 42), 1), ((1, 672, 11, 11), 1), ((2, 48, 33, 35), 2)])
def test_each_has_its_own_window(size, stride, windows):
    torch.manual_seed(0)
    options = (True, [stride] * 2)
    convolutions = []
    for window in windows:
        image, weight = rand(*size), rand(size[1], 1, window, window).contiguous()
        rest = ([window // 2] * 4, [1, 1])
        exact = CONVOLVE_DEPTHWISE(image.double(), weight.double(), True, size[1], [stride] * 2, *rest)
        convolutions.append((image, weight, *options, *rest, spoilt(*exact.shape)))
    convolve_depthwise_together(*convolutions)
    for image, weight, *options, out in convolutions:
        apart = torch.empty_like(out)
        convolve_depthwise(image, weight, *options, out=apart)
        assert torch.equal(out, apart)
        exact = CONVOLVE_DEPTHWISE(image.double(), weight.double(), True, size[1], *options[1:])
        networks.assert_close(out, exact.half(), EPS)


class Cell(nn.Module):
    """Five separable convolutions beside one another, as in NASNet's cells."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(32, 40, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(40, 40, size, padding=size // 2, groups=40, bias=False),
                nn.Conv2d(40, 40, 1),
                nn.ReLU(),
                nn.Conv2d(40, 40, size, padding=size // 2, groups=40, bias=False),
                nn.Conv2d(40, 40, 1),
            )
            for size in (5, 3, 3, 5, 3)
        )

    def forward(self, x):
        x = self.first(x)
        return torch.cat([branch(x) for branch in self.branches], 1)


def test_in_a_network_on_streams(names_on_streams):
    names = names_on_streams(Cell)
    assert len([name for name in names if name.startswith("5 × convolve")]) == 4
    assert not any(name.startswith("convolve_depthwise") for name in names)
