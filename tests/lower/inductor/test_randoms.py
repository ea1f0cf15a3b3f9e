"""Random numbers that fill memory in place, and rows that are shuffled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms

FILLS = [
    pytest.param(lambda x: torch.empty_like(x).normal_(2.0, 3.0), 2.0, 3.0, id="normal"),
    pytest.param(lambda x: x.new_empty(x.shape).uniform_(1.0, 5.0), 3.0, 4 / 12**0.5, id="uniform"),
    pytest.param(lambda x: x.new_empty(x.shape).bernoulli_(0.75), 0.75, 0.1875**0.5, id="bernoulli"),
]


@pytest.mark.parametrize("wrap", [ms.compile, ms.step])
@pytest.mark.parametrize(("fill", "mean", "deviation"), FILLS)
def test_they_are_drawn_anew_and_from_the_seed(wrap, fill, mean, deviation):
    torch._dynamo.reset()
    run, x = wrap(fill, strict=True), torch.zeros(200, 100)
    run(x)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append([run(x), run(x)])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(*drawn[0])
    assert all(abs(each.mean() - mean) < 0.1 for each in drawn[0])
    assert all(abs(each.std() - deviation) < 0.1 for each in drawn[0])


@pytest.mark.parametrize("wrap", [ms.compile, ms.step])
@pytest.mark.parametrize("kept", [8, 3])
def test_shuffled_rows_are_rows(wrap, kept):
    torch._dynamo.reset()
    run, x = wrap(lambda x: x[torch.randperm(8)[:kept]], strict=True), torch.arange(16.0).view(8, 2)
    seen = [run(x) for _ in range(5)]
    assert all(set(map(tuple, each.tolist())) <= set(map(tuple, x.tolist())) for each in seen)
    assert all(len({*map(tuple, each.tolist())}) == kept for each in seen)
    assert len({tuple(each.flatten().tolist()) for each in seen[1:]}) > 1


def test_distributions_within_a_step():
    torch.manual_seed(0)
    encode, decode = nn.Linear(6, 4), nn.Linear(2, 6)
    optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], 1e-2)

    def step(x):
        mean, spread = encode(x).chunk(2, 1)
        seen = torch.distributions.Normal(mean, spread.exp())
        wanted = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        loss = F.mse_loss(decode(seen.rsample()), x) + torch.distributions.kl_divergence(seen, wanted).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    is_checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        captured, x = ms.step(step, strict=True), torch.randn(16, 6)
        losses = [captured(x).item() for _ in range(60)]
        assert torch.distributions.Distribution._validate_args
    finally:
        torch.distributions.Distribution.set_default_validate_args(is_checked)
    assert sum(losses[-10:]) < sum(losses[:10])
