"""Loops in Python whose iterations are equal: lowered once, they compute what eager steps do."""

import copy

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.passes import rolling
from tests.api.test_loops import trained

pytestmark = pytest.mark.gpu


class Recurrence(nn.Module):
    """An LSTM by hand; inputs are 33 wide, so that their rows are not aligned."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.x, self.h, self.width = nn.Linear(33, 4 * width), nn.Linear(width, 4 * width), width

    def forward(self, x):
        h = c = x.new_zeros(x.shape[1], self.width)
        states = []
        for row in x:
            i, f, g, o = (self.x(row) + self.h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states)


@pytest.mark.parametrize("engine", ["graph", "serial", "streams"])
def test_training_through_a_loop_is_as_eager(engine, monkeypatch):
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 100)
    torch.manual_seed(1)
    batches = [torch.randn(24, 15, 33, device="cuda", dtype=torch.float64) for _ in range(4)]
    model = Recurrence().to("cuda", torch.float64)
    expected, _ = trained(lambda function: function, copy.deepcopy(model), batches)
    found, step = trained(ms.step(engine=engine, strict=True, tune="now"), model, batches)
    torch.testing.assert_close(found, expected)
    assert "equal iterations of a loop" in str(ms.explain(step))
