"""Sums that are split, and the kernel that adds them up."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from millstream.kernels.conv2d import conv2d
from millstream.kernels.conv2d.conv2d import Conv2d, convolve_2d_partials, partials_shape, reduce_2d_partials
from tests import networks

pytestmark = pytest.mark.gpu

SHAPES = [  # image, channels of the result, window, stride, padding
    ((1, 2048, 8, 8), 320, (1, 1), (1, 1), (0, 0)),
    ((1, 4032, 11, 11), 672, (1, 1), (1, 1), (0, 0)),
    ((2, 2056, 5, 4), 24, (1, 1), (1, 1), (0, 0)),
    ((1, 256, 9, 7), 40, (3, 3), (1, 1), (1, 1)),
    ((1, 200, 14, 14), 136, (3, 5), (2, 1), (0, 2)),
]


def rand(*size, dtype=torch.half):
    return torch.randn(size, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)


def make(size, outputs, window, stride, padding, *, dtype=torch.half, relu=True, missing=0, wider=0, has_addend=True):
    """A convolution that has not been computed yet, and what it comes to."""
    image = rand(*size, dtype=dtype)
    weight = rand(outputs, size[1], *window, dtype=dtype) / (size[1] * window[0] * window[1]) ** 0.5
    bias, kept = rand(outputs, 1, 1, 1, dtype=dtype).flatten(), outputs - missing
    exact = functional.conv2d(image.double(), weight.double(), None, stride, padding)
    out = torch.full_like(exact, float("nan"), dtype=dtype, memory_format=torch.channels_last)
    addend = rand(out.shape[0], outputs + wider, *out.shape[2:], dtype=dtype) if has_addend else None
    exact = exact[:, :kept] + bias[:kept].double().view(-1, 1, 1)
    exact = exact if addend is None else exact + addend[:, :kept].double()
    exact = torch.relu(exact) if relu else exact
    return Conv2d(image, weight, bias[:kept], addend, relu, kept, [*stride], [*padding], out), exact.to(dtype)


def compute(convolutions, num_splits):
    out = convolutions[0].out
    num_pixels = out.shape[0] * out.shape[2] * out.shape[3]
    partials = torch.full((len(convolutions), num_splits, num_pixels, out.shape[1]), float("nan"), device="cuda")
    _, _, *_, stride, padding, out = convolutions[0]
    convolve_2d_partials(out.shape, stride, padding, *(each[:2] for each in convolutions), out=partials)
    reduce_2d_partials(partials, *(each.rest for each in convolutions))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [2, 5, 6])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("relu", "missing", "wider"), [(True, 0, 0), (False, 2, 8), (True, 6, 0)])
def test_partials_come_to_the_whole(shape, num_splits, dtype, relu, missing, wider):
    torch.manual_seed(0)
    convolution, exact = make(*shape, dtype=dtype, relu=relu, missing=missing, wider=wider)
    compute([convolution], num_splits)
    networks.assert_close(convolution.out[:, : convolution.kept], exact, 2 * torch.finfo(dtype).eps)
    assert not convolution.out[:, convolution.kept :].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_results_may_have_others_between_them(shape):
    torch.manual_seed(0)
    convolution, exact = make(*shape)
    channels = exact.shape[1]
    whole = torch.zeros(exact.shape[0], channels + 24, *exact.shape[2:], device="cuda", dtype=torch.half)
    whole = whole.contiguous(memory_format=torch.channels_last)
    compute([convolution._replace(out=whole[:, 8 : 8 + channels])], 3)
    networks.assert_close(whole[:, 8 : 8 + channels], exact, 2 * torch.finfo(torch.half).eps)
    assert not whole[:, :8].any()
    assert not whole[:, 8 + channels :].any()


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_several_at_once_are_to_the_bit_as_alone(shape, number):
    torch.manual_seed(0)
    made = [make(*shape, has_addend=i in (1, 2)) for i in range(number)]
    compute([convolution for convolution, _ in made], 4)
    for convolution, exact in made:
        networks.assert_close(convolution.out, exact, 2 * torch.finfo(torch.half).eps)
        alone = convolution._replace(out=torch.full_like(convolution.out, float("nan")))
        compute([alone], 4)
        assert torch.equal(alone.out, convolution.out)


def test_what_the_library_splits():
    (convolution, _), (short, _) = make(*SHAPES[0]), make((1, 64, 8, 8), *SHAPES[0][1:])
    shape = partials_shape([convolution])
    assert shape is not None
    assert shape[1] > 1
    assert partials_shape([short]) is None
    assert len(conv2d.launches_of_conv2d([convolution])) == 2


class Funnel(nn.Module):
    """Long sums of few results, alone and side by side."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(32, 2048, 1)
        self.narrow = nn.ModuleList(nn.Conv2d(2048, 40, 1) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.wide(x[..., :8, :8]))
        first, *others = (narrow(x) for narrow in self.narrow)
        return torch.relu(first + 1) + sum(torch.relu(other) for other in others)


def test_in_a_network_on_streams(names_on_streams):
    names = names_on_streams(Funnel)
    assert any("convolve_2d_partials" in name for name in names)
    assert any("reduce_2d_partials" in name for name in names)
