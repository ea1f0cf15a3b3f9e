"""On a GPU: a plan is chosen between the calls of a step, and losses and weights have the same bits meanwhile."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.engine.planning import background

pytestmark = pytest.mark.gpu


def make_step(**settings):
    torch.manual_seed(0)
    towers = nn.ModuleList(nn.Sequential(*[nn.Linear(256, 256), nn.GELU()] * 4) for _ in range(4)).cuda()
    optimizer = torch.optim.SGD(towers.parameters(), 0.05, momentum=0.9)

    @ms.step(strict=True, **settings)
    def step(x):
        loss = sum(nn.functional.dropout(tower(x), 0.1).square().mean() for tower in towers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, towers


def test_training_goes_on_with_the_same_bits_while_plans_are_tried(monkeypatch):
    monkeypatch.setattr(background, "SHARE", 0.9)  # so that it does not take minutes
    alone = {"alternatives": False}  # with one of them the program would be another, and tuned anew
    (tuned, first), (plain, second) = make_step(tune="background", options=alone), make_step(streams=1, options=alone)

    def losses_of(step, is_enough):
        torch.manual_seed(1)
        x, losses = torch.randn(64, 256, device="cuda"), []
        while not is_enough(losses):
            losses.append(step(x))
        return losses

    def is_tuned(losses):  # how long that takes is up to the host
        if len(losses) < 300:
            return False
        engine = executables(tuned)[0]
        return len(losses) >= 20_000 or (engine._settled and engine.is_captured)

    tuned_losses = losses_of(tuned, is_tuned)
    losses = tuned_losses, losses_of(plain, lambda losses: len(losses) == len(tuned_losses))
    (executable,) = executables(tuned)
    assert executable._settled
    assert executable.is_captured
    assert executable.candidates
    assert all(map(torch.equal, *losses))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
