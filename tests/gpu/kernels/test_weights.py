"""Weights that are put into the layout and type in which convolutions read them."""

import pytest
import torch
from torch import nn

from millstream.kernels.weights.weights import CONVERT, Conversion, convert_weight, convert_weights_together

pytestmark = pytest.mark.gpu

SHAPES = [  # of a weight, and how many channels of zeros come after it
    ((18, 20, 3, 3), (6, 4)),
    ((24, 40, 1, 7), (0, 0)),
    ((16, 8, 5, 5), (0, 8)),
    ((64, 3, 7, 7), (0, 0)),
    ((7, 300, 2, 2), (1, 4)),
    ((512, 512, 3, 3), (0, 0)),
    ((40, 40, 3, 1), (0, 0)),
    ((8, 8, 3, 3), (8, 8)),
    ((33, 18, 1, 1), (7, 6)),
    ((256, 64, 1, 1), (0, 0)),
]


def make(shape, more, dtype=torch.half, wanted=torch.half, layout=torch.contiguous_format):
    weight = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    size = (shape[0] + more[0], shape[1] + more[1], *shape[2:])
    out = torch.full(size, float("nan"), device="cuda", dtype=wanted).contiguous(memory_format=torch.channels_last)
    return Conversion(weight, out)


def assert_converted(conversion):
    exact = CONVERT(conversion.weight, [*conversion.out.shape], conversion.out.dtype)
    assert exact.stride() == conversion.out.stride()
    assert torch.equal(conversion.out, exact)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.half, torch.half),
        (torch.float, torch.half),
        (torch.float, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float, torch.float),
    ],
)
@pytest.mark.parametrize(("shape", "more"), SHAPES)
def test_one_is_converted(shape, more, dtype, wanted, layout):
    torch.manual_seed(0)
    conversion = make(shape, more, dtype, wanted, layout)
    convert_weight(conversion.weight, out=conversion.out)
    assert_converted(conversion)


@pytest.mark.parametrize("number", [2, 3, 5, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [(1, 1), (3, 3), (1, 7), (5, 5)])
@pytest.mark.parametrize("is_widened", [False, True])
def test_several_of_any_size_are(is_widened, window, layout, number):
    torch.manual_seed(number)
    conversions = []
    for _ in range(number):
        shape, more = torch.randint(1, 200, (2,)).tolist(), torch.randint(1, 9, (2,)).tolist()
        more = more if is_widened else [0, 0]
        conversions.append(make((*shape, *window), more, torch.float, torch.half, layout))
    convert_weights_together(*conversions)
    for conversion in conversions:
        assert_converted(conversion)


class Convolutions(nn.Module):
    """Weights of several sizes, one of which is read twice and one also by others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(32, 32, size, padding=size // 2) for size in (3, 5, 3, 1, 3, 7, 3))
        self.odd = nn.Conv2d(32, 18, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.layers[0](x) + self.layers[1].weight.sum()
        return self.odd(x)


def test_in_a_network_on_streams(names_on_streams):
    names = names_on_streams(Convolutions, layout=torch.contiguous_format)
    assert any("× convert_weight" in name for name in names)
    kept = names_on_streams(Convolutions)
    assert [name for name in kept if "convert_weight" in name] == ["convert_weight"]  # which adds zeros to the odd one
