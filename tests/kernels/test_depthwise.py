"""Which convolutions our own kernel computes. What it computes is tested on a GPU."""

from functools import partial

import pytest
import torch

from millstream.kernels import cudnn, nodes
from millstream.kernels.depthwise.depthwise import MOST_OUTPUTS, convolve_depthwise
from tests.kernels import stand_ins
from tests.kernels.stand_ins import pretended_gpu

__all__ = ["pretended_gpu"]
pytestmark = pytest.mark.usefixtures("pretended_gpu")

writer = partial(stand_ins.writer, groups=32)


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
        {"groups": 1},
        {"groups": 16},
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
    monkeypatch.setattr(nodes, "_has_triton", lambda: False)
    assert writer() is cudnn.convolve
