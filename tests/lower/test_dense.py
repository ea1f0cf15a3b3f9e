"""Which convolutions our own kernel computes, and in which tiles. What it computes is tested on a GPU."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.lower.convolutions import writers
from millstream.lower.convolutions.dense import convolve_dense
from millstream.lower.convolutions.dense_tiles import choose_splits, choose_tile
from tests.lower import convolutions
from tests.lower.convolutions import pretended_gpu

__all__ = ["pretended_gpu"]
pytestmark = pytest.mark.usefixtures("pretended_gpu")

writer = partial(convolutions.writer, outputs=64, weight_layout=torch.channels_last)


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
    ],
)
def test_a_small_convolution_is_ours(kwargs):
    assert writer(**kwargs) is convolve_dense


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
    assert writer(**kwargs) is not convolve_dense


def test_one_dimension_or_three_are_not():
    assert writer(size=(1, 32, 14), window=(3,), layout=torch.contiguous_format,
                  weight_layout=torch.contiguous_format) is not convolve_dense  # fmt: skip
    assert writer(size=(1, 32, 4, 4, 4), window=(3, 3, 3), layout=torch.channels_last_3d,
                  weight_layout=torch.channels_last_3d) is not convolve_dense  # fmt: skip


def test_where_there_is_no_triton_cudnn_computes_it(monkeypatch):
    monkeypatch.setattr(writers, "_has_triton", lambda: False)
    assert writer() is writers.convolve


def test_a_few_pixels_get_small_tiles_and_many_get_large_ones():
    """A block for each multiprocessor first of all; beyond that, each number is to be read as seldom as may be."""

    def tile(pixels, channels, window):
        with FakeTensorMode():
            weight, output = torch.empty(channels, channels, window, window), torch.empty(1, channels, 1, pixels)
        return choose_tile(weight, output, [1, 1], [window // 2] * 2)

    for window in (1, 3):
        few, more, many = (tile(pixels, 64, window) for pixels in (49, 56 * 56, 112 * 112))
        assert few.pixels * few.channels < more.pixels * more.channels < many.pixels * many.channels


@pytest.mark.parametrize(
    ("inputs", "outputs", "pixels", "window", "depth"),
    [
        (144, 144, 49, (3, 3), 64),
        (72, 72, 196, (3, 3), 64),
        (40, 72, 196, (3, 3), 16),  # short
        (128, 32, 196, (3, 3), 16),  # rows of a multiple of 128 numbers
        (128, 128, 196, (3, 3), None),  # likewise, and more
        (40, 40, 784, (3, 3), None),  # many blocks
        (192, 192, 49, (3, 3), None),  # long
        (960, 320, 49, (1, 1), 64),
        (512, 320, 49, (1, 1), None),
    ],
)
def test_a_few_results_of_medium_sums_are_computed_at_once(inputs, outputs, pixels, window, depth):
    with FakeTensorMode():
        weight, output = torch.empty(outputs, inputs, *window), torch.empty(1, outputs, 1, pixels)
    tile = choose_tile(weight, output, [1, 1], [n // 2 for n in window])
    assert (tile.depth if tile.groups > 1 else None) == depth
    assert depth is None or choose_splits(weight, output) == 1


def test_many_together_are_not_computed_at_once():
    with FakeTensorMode():
        weight, output = torch.empty(72, 72, 3, 3), torch.empty(1, 72, 14, 14)
    assert choose_tile(weight, output, [1, 1], [1, 1], 1).groups > 1
    assert choose_tile(weight, output, [1, 1], [1, 1], 2).groups == 1
