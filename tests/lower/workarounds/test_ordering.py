"""Gradients of upsampling are right beside what is computed for all blocks of a network, as in diffusion models."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import millstream as ms


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.main, self.beside = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(inputs, outputs, 1)
        self.time = nn.Linear(8, outputs)

    def forward(self, x, t):
        out = self.beside(x) + self.main(functional.silu(x)) + self.time(functional.silu(t))[:, :, None, None]
        return out / 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.first = nn.Linear(8, 8), nn.Conv2d(2, 8, 3, padding=1)
        self.down, self.behind = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.low, self.high, self.last = Block(32, 16), Block(24, 8), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x, t):
        t = self.time(t)
        high = self.first(x)
        low = self.down(high)
        low = self.low(torch.cat([low, low], 1), t)
        low = self.behind(functional.interpolate(low, scale_factor=2.0))
        return self.last(self.high(torch.cat([low, high], 1), t))


@pytest.mark.parametrize("way", ["step", "compile"])
def test_gradients_of_upsampling_are_right(way):
    torch.manual_seed(0)
    net = Net().double()
    x, t = torch.randn(2, 2, 8, 8).double(), torch.randn(2, 8).double()

    def gradients(model):
        model(x, t).square().sum().backward()

    gradients(net)
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    if way == "step":
        ms.step(lambda: gradients(net), engine="serial", strict=True)()
    else:
        gradients(ms.compile(net, engine="serial", strict=True))
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
