"""Recurrent networks in a step: what is dropped out between their layers is eager's."""

import pytest
import torch
from torch import nn

from millstream.capture.step.step import Step
from tests.capture.worlds import interpret


def assert_as_eager(network):
    def step(x):
        loss = network(x)[0].square().sum()
        loss.backward()
        return loss.detach(), *(each.grad for each in network.parameters())

    x, runs = torch.randn(3, 2, 3), []
    for run in (step, Step(step, build=interpret, strict=True)):
        torch.manual_seed(1)
        runs.append([])
        for _ in range(3):
            runs[-1] += [each.clone() for each in run(x)]
            network.zero_grad()
    torch.testing.assert_close(runs[1], runs[0])


@pytest.mark.parametrize(
    "network",
    [
        nn.LSTM(3, 4, 2, dropout=0.5),
        nn.GRU(3, 4, 3, dropout=0.2, bidirectional=True),
        nn.RNN(3, 4, 2, dropout=0.5, batch_first=True),
    ],
)
def test_layers_drop_out_what_they_do_in_eager(network):
    assert_as_eager(network)
