"""Whole networks as they come to a GPU, through all that is done to convolutions; computed on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.kernels.stand_ins import own_kernels, pretended_gpu, run_everywhere
from tests.networks import assert_close

__all__ = ["own_kernels", "pretended_gpu"]


class Conv(nn.Conv2d):
    def __init__(self, inputs, outputs, size=1, **options):
        super().__init__(inputs, outputs, size, padding=size // 2, **options)


class Separable(nn.Module):
    """Twice relu, a depthwise convolution and a product, as in NASNet-A."""

    def __init__(self, inputs, outputs, size, stride=1):
        super().__init__()
        self.depthwise = nn.ModuleList(
            Conv(width, width, size, groups=width, bias=False, stride=step)
            for width, step in ((inputs, stride), (outputs, 1))
        )
        self.products = nn.ModuleList(Conv(width, outputs) for width in (inputs, outputs))

    def forward(self, x):
        for depthwise, product in zip(self.depthwise, self.products, strict=True):
            x = product(depthwise(torch.relu(x)))
        return x


class Cells(nn.Module):
    """Cells of NASNet-A's kind, of which each reads the results of two; odd widths, and long sums at their entries."""

    def __init__(self, width=10):
        super().__init__()
        self.stem = Conv(3, 24, 3, stride=2)
        self.entries = nn.ModuleList(
            nn.ModuleList([Conv(before, width), Conv(now, width)]) for before, now in ((24, 24), (24, 1536))
        )
        self.branches = nn.ModuleList(
            nn.ModuleList([Separable(width, width, size) for size in (5, 3, 5, 3, 3)]) for _ in range(2)
        )
        self.wide = Conv(5 * width, 1536)
        self.head = nn.Linear(5 * width, 7)

    def forward(self, x):
        before = now = self.stem(x)
        for i, (entries, branches) in enumerate(zip(self.entries, self.branches, strict=True)):
            left, right = entries[0](torch.relu(before)), entries[1](torch.relu(now))
            first, second, third, fourth, fifth = branches
            parts = [
                first(left) + second(right),
                third(right) + fourth(right),
                F.avg_pool2d(left, 3, 1, 1, count_include_pad=False) + right,
                F.max_pool2d(left, 3, 1, 1) + fifth(left),
                right,
            ]
            joined = torch.cat(parts, 1)
            before, now = now, joined if i else self.wide(joined)
        return self.head(torch.relu(now).mean((2, 3)))


class Branches(nn.Module):
    """Inception-v3's last blocks in small: branches of many widths, long sums, and results written side by side."""

    def __init__(self):
        super().__init__()
        self.reduce = Conv(3, 32, 3, stride=2)
        self.widen = Conv(32, 1536)
        self.straight, self.entry, self.other = Conv(1536, 40), Conv(1536, 24), Conv(1536, 24)
        self.three = Conv(24, 40, 3)
        self.wide, self.high = nn.Conv2d(40, 16, (1, 3), padding=(0, 1)), nn.Conv2d(40, 16, (3, 1), padding=(1, 0))
        self.pooled, self.last = Conv(1536, 8), Conv(104, 72, 3)

    def forward(self, x):
        x = torch.relu(self.widen(torch.relu(self.reduce(x))))
        deep = torch.relu(self.three(torch.relu(self.entry(x))))
        parts = [
            self.straight(x),
            self.wide(deep),
            self.high(deep),
            self.other(x),
            self.pooled(F.avg_pool2d(x, 3, 1, 1)),
        ]
        return torch.relu(self.last(torch.cat([torch.relu(part) for part in parts], 1)))


class Bottlenecks(nn.Module):
    """ResNet's blocks: sums that go into convolutions, long ones as well."""

    def __init__(self):
        super().__init__()
        self.stem = Conv(3, 64, 7, stride=2)
        self.narrow = nn.ModuleList([Conv(64, 200), Conv(64, 200)])
        self.middle = nn.ModuleList([Conv(200, 200, 3), Conv(200, 200, 3)])
        self.widen = nn.ModuleList([Conv(200, 64), Conv(200, 64)])

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        for narrow, middle, widen in zip(self.narrow, self.middle, self.widen, strict=True):
            x = torch.relu(x + widen(torch.relu(middle(torch.relu(narrow(x))))))
        return x


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        (Cells, {"convolve_depthwise_together", "convolve_2d_together", "convolve_2d_partials"}),
        (Branches, {"convolve_2d", "convolve_2d_partials"}),
        (Bottlenecks, {"convolve_2d", "convolve_2d_partials"}),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_network_computes_what_it_did_in_any_order(own_kernels, kind, called, layout):
    torch.manual_seed(0)
    model = kind().double().eval().to(memory_format=layout)
    x = torch.randn(2, 3, 18, 22, dtype=torch.double).contiguous(memory_format=layout)
    _, results = run_everywhere(model, x)
    with torch.no_grad():
        assert_close(results[0], model(x), 1e-6)  # partial sums are in single precision
    assert all(torch.equal(result, results[0]) for result in results)
    assert called <= own_kernels.keys()
    assert own_kernels["convolve_2d_partials"] == own_kernels["reduce_2d_partials"]
