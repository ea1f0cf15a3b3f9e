"""Which convolutions our own kernel computes, and in which tiles. What it computes is tested on a GPU."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.kernels import cudnn, nodes
from millstream.kernels.conv2d.conv2d import convolve_2d
from millstream.kernels.conv2d.conv2d_tiles import choose_tile
from tests.kernels import stand_ins
from tests.kernels.stand_ins import pretended_gpu

__all__ = ["pretended_gpu"]
pytestmark = pytest.mark.usefixtures("pretended_gpu")

writer = partial(stand_ins.writer, outputs=64, weight_layout=torch.channels_last)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"dtype": torch.bfloat16},
        {"window": (1, 1)},
        {"window": (1, 1), "weight_layout": torch.contiguous_format},
        {"window": (1, 7)},
        {"size": (2, 24, 7, 9), "outputs": 8},
        {"size": (1, 512, 14, 14)},
        {"size": (1, 4608, 14, 14), "window": (1, 1)},
        {"size": (1, 512, 1, 63), "window": (1, 3)},
        {"size": (1, 4608, 1, 70), "window": (1, 1)},
    ],
)
def test_a_small_convolution_is_ours(kwargs):
    assert writer(**kwargs) is convolve_2d


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": torch.float32},
        {"outputs": 63},
        {"size": (1, 30, 14, 14)},
        {"groups": 2},
        {"dilation": 2},
        {"transposed": True},
        {"bias": True},
        {"layout": torch.contiguous_format},
        {"weight_layout": torch.contiguous_format},
        {"size": (0, 32, 14, 14)},
        {"size": (1, 520, 14, 14)},
        {"size": (1, 4616, 14, 14), "window": (1, 1)},
        {"size": (64, 128, 28, 28)},
        {"size": (16, 64, 56, 56)},
        {"size": (32, 64, 56, 56), "window": (1, 1)},
    ],
)
def test_another_one_is_not(kwargs):
    assert writer(**kwargs) is not convolve_2d


def test_one_dimension_or_three_are_not():
    assert writer(size=(1, 32, 14), window=(3,), layout=torch.contiguous_format,
                  weight_layout=torch.contiguous_format) is not convolve_2d  # fmt: skip
    assert writer(size=(1, 32, 4, 4, 4), window=(3, 3, 3), layout=torch.channels_last_3d,
                  weight_layout=torch.channels_last_3d) is not convolve_2d  # fmt: skip


def test_where_there_is_no_triton_cudnn_computes_it(monkeypatch):
    monkeypatch.setattr(nodes, "_has_triton", lambda: False)
    assert writer() is cudnn.convolve


def test_a_few_pixels_get_small_tiles_and_many_get_large_ones():
    """A block for each multiprocessor first of all; beyond that, each number is to be read as seldom as may be."""

    def tile(pixels, channels, window):
        with FakeTensorMode():
            weight, output = torch.empty(channels, channels, window, window), torch.empty(1, channels, 1, pixels)
        return choose_tile(weight, output, [1, 1], [window // 2] * 2)

    for window in (1, 3):
        few, more, many = (tile(pixels, 64, window) for pixels in (49, 56 * 56, 112 * 112))
        assert few.pixels * few.channels < more.pixels * more.channels < many.pixels * many.channels
