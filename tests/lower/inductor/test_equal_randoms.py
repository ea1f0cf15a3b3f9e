"""``fallback_random=True``: the numbers that eager PyTorch draws, and its generator left as it leaves it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import millstream as ms

EQUAL = {"fallback_random": True}
KEEPS_ORDER = torch.__version__ >= "2.13"
"""Whether PyTorch's compiler leaves different random operators in the order of the program."""


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True)
        self.rnn = nn.RNN(4, 4, 2, dropout=0.5)

    def forward(self, x):
        return self.rnn(self.lstm(x)[0])[0]


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        x = self.conv(torch.cat([x, x])[..., None])
        x = F.dropout2d(x, 0.5) + F.alpha_dropout(x, 0.3, training=True)
        x = F.dropout(x * 2, 0.2, inplace=True) + F.feature_alpha_dropout(x, 0.3, training=True)
        x = F.dropout(x.transpose(1, 2), 0.5) * torch.rand(4, 1) + torch.randn_like(x.transpose(1, 2))
        return x + torch.bernoulli(torch.full((4, 1), 0.4))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x):
        x = checkpoint(self.first, F.dropout(x, 0.1), use_reentrant=False)
        return F.dropout(checkpoint(self.second, x, use_reentrant=False), 0.3)


def train(make, wrap):
    """Losses, parameters and the next number of the generator, after some steps from one seed."""
    torch.manual_seed(0)
    model = make()
    x = torch.randn(2, 2, 3) if make is not Dropouts else torch.randn(2, 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = wrap(model, optimizer)
    losses = [step(x).detach() for _ in range(3)]
    return losses, [each.detach() for each in model.parameters()], torch.rand(2)


def step_of(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("make", [Recurrent, *[Dropouts] * KEEPS_ORDER, Checkpointed])
def test_a_step_draws_what_eager_draws(make):
    expected = train(make, step_of)
    found = train(make, lambda *of: ms.step(step_of(*of), strict=True, options=EQUAL))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [*[Dropouts] * KEEPS_ORDER, Checkpointed])
def test_a_compiled_model_draws_what_eager_draws(make):
    torch._dynamo.reset()
    expected = train(make, step_of)
    found = train(make, lambda model, optimizer: step_of(ms.compile(model, strict=True, options=EQUAL), optimizer))
    torch.testing.assert_close(found, expected)
