"""Linear layers for few rows are convolutions of one pixel, for our kernel."""

import pytest
import torch
from torch import nn

from millstream.kernels.conv2d import conv2d, linear
from millstream.kernels.conv2d.conv2d import CONVOLVE
from millstream.kernels.conv2d.linear import MOST_ROWS, take_linear_layers
from tests.kernels.stand_ins import own_kernels, pretended_gpu, run_everywhere
from tests.kernels.test_channels import DOUBLE, changed, close

__all__ = ["own_kernels", "pretended_gpu"]  # fixtures


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Take every device for one where our kernels can be had, and doubles for half precision."""
    monkeypatch.setattr(linear, "may_be_ours", lambda value: True)
    monkeypatch.setattr(conv2d, "_DTYPES", (DOUBLE,))


def taken(model, x):
    """How many products of a model are ours, and its result as well."""
    gm = changed(model, x, take_linear_layers)
    return sum(node.target is CONVOLVE for node in gm.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, MOST_ROWS])
def test_few_rows(rows, bias):
    assert taken(nn.Linear(32, 24, bias=bias, dtype=DOUBLE), torch.randn(rows, 32, dtype=DOUBLE)) == 1


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(32, 24), torch.randn(MOST_ROWS + 1, 32)),
        (nn.Linear(30, 24), torch.randn(1, 30)),  # no multiple of what tensor cores load at a time
        (nn.Linear(32, 23), torch.randn(1, 32)),
        (nn.Linear(8192, 8192), torch.randn(1, 8192)),  # too large
    ],
)
def test_others_stay(layer, x):
    assert taken(layer.to(DOUBLE), x.to(DOUBLE)) == 0


class Product(nn.Module):
    """A product with something that is no weight in memory."""

    def forward(self, x):
        return x @ (x.t() * 2).contiguous()


def test_a_factor_that_lies_in_memory_in_another_way_stays():
    assert taken(Product(), torch.randn(8, 16, dtype=DOUBLE)) == 0


class Gates(nn.Module):
    """A step of a sequence, multiplied with one weight or with several."""

    def __init__(self, number):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(16, 8) for _ in range(number))

    def forward(self, x):
        step = x[:, 2]
        return sum(gate(step) for gate in self.gates)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_rows_with_gaps_are_copied_once_for_several(number):
    model, x = Gates(number).to(DOUBLE), torch.randn(3, 5, 16, dtype=DOUBLE)
    gm = changed(model, x, take_linear_layers)
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(CONVOLVE) == (0 if number == 1 else number)
    assert targets.count(torch.ops.aten.clone.default) == (0 if number == 1 else 1)


class Square(nn.Module):
    """A product with itself."""

    def forward(self, x):
        return x @ x, x @ x.t()


def test_a_matrix_with_itself():
    assert taken(Square(), torch.randn(8, 8, dtype=DOUBLE)) == 1


class Head(nn.Module):
    """The end of a network for images, and something after it."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 64, 3)
        self.first, self.second = nn.Linear(64, 40), nn.Linear(40, 16, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(torch.relu(self.convolution(x)).mean((2, 3)))))


def test_in_a_network(own_kernels):
    torch.manual_seed(0)
    model, x = Head().to(DOUBLE).eval(), torch.randn(2, 8, 9, 9, dtype=DOUBLE)
    with torch.no_grad():
        wanted = model(x)
    program, results = run_everywhere(model, x)
    for result in results:
        close(result, wanted)
        assert result.stride() == wanted.stride()
    ops = [kernel.ops for kernel in program.graph.kernels]
    assert sum("linear" in each for each in ops) == 2
    assert not any("mm" in kernel.name for kernel in program.graph.kernels)
