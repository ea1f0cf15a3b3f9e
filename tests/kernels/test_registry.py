"""Families of our own kernels: by which names a device knows them, and that each can be left out."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.workarounds import without
from millstream.kernels.registry import FAMILIES, SWITCH, is_generated
from tests.kernels.stand_ins import own_kernels, pretended_gpu
from tests.networks import assert_close

__all__ = ["own_kernels", "pretended_gpu"]

ROOT = Path(__file__).parents[2]
LAUNCHED = re.compile(r"from millstream\.kernels\.\w+\.\w+_kernel import (\w+)")
ROW = re.compile(r"^\| `(\S+)` \| (.+?) \|$", re.MULTILINE)


def test_each_kernel_that_is_launched_is_known():
    """Triton, whose functions tell their names, is there where there is a GPU."""
    files = (ROOT / "src" / "millstream" / "kernels").rglob("*.py")
    hosts = [file.read_text() for file in files if not file.stem.endswith("_kernel")]
    launched = {name for text in hosts for name in LAUNCHED.findall(text)}
    assert launched == {name for family in FAMILIES for name in family.kernels}


def test_generated_kernels_are_told_from_those_of_libraries():
    assert is_generated("triton_poi_fused_add_3")
    assert not is_generated("_ZN2at6native29vectorized_elementwise_kernelILi4E")
    assert not is_generated("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32")


def test_every_family_is_in_the_reference():
    page = (ROOT / "docs" / "options.md").read_text()
    section = page.partition("## Kernels of our own")[2].partition("\n## ")[0]
    assert ROW.findall(section) == [(family.name, family.effect) for family in FAMILIES]


class EachOfThem(nn.Module):
    """Something for each family and pass: convolutions alike, depthwise, odd, with a long sum, and for cuDNN alone."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.odd, self.even = nn.Conv2d(16, 12, 1), nn.Conv2d(12, 16, 1)
        self.wide, self.long = nn.Conv2d(16, 1536, 1), nn.Conv2d(1536, 16, 1)
        self.head = nn.Linear(16, 8)
        self.sparse, self.last = (nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False) for _ in range(2))

    def forward(self, x):
        x = self.left(x) * self.right(x) + self.each(torch.relu(x)) + self.last(self.sparse(x))
        x = self.long(torch.relu(self.wide(x + self.even(self.odd(x)))))
        return self.head(x.mean((2, 3)))


OF_FAMILY = {
    "conv2d": {"convolve_2d", "convolve_2d_together", "convolve_2d_partials", "reduce_2d_partials"},
    "depthwise": {"convolve_depthwise"},
    "weights": {"convert_weight", "convert_weights_together"},
    "cudnn": {"convolve"},
    "horizontal-fusion": {"convolve_2d_together", "convert_weights_together"},
    "split-k": {"convolve_2d_partials", "reduce_2d_partials"},
    "rows": set(),  # alternatives, which nothing has from the start (``test_rows``)
}


def called_by(own_kernels, **options):
    """Names of the kernels that such a model calls; it computes what eager PyTorch does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = EachOfThem().double().eval(), torch.randn(2, 16, 6, 6, dtype=torch.double)
    own_kernels.clear()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        compiled = ms.compile(model, engine="serial", strict=True, **options)
        assert_close(compiled(x), model(x), 1e-6)  # partial sums are in single precision
    return {*own_kernels}


def test_each_family_can_be_left_out(own_kernels):
    every = called_by(own_kernels)
    assert set(OF_FAMILY) == {family.name for family in FAMILIES}
    assert every >= set().union(*OF_FAMILY.values()) - {"convolve_2d", "convert_weight"}
    for name, own in OF_FAMILY.items():
        with without({name}):
            assert called_by(own_kernels).isdisjoint(own), name


@pytest.mark.parametrize("by", ["option", "environment"])
def test_all_can_be_left_out(own_kernels, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("MILLSTREAM_WITHOUT", SWITCH)
    assert not called_by(own_kernels, options={"own_kernels": False} if by == "option" else None)


def test_the_option_is_a_boolean():
    with pytest.raises(ms.ArgumentError, match="own_kernels='weights' is neither True nor False"):
        ms.compile(EachOfThem(), options={"own_kernels": "weights"})
