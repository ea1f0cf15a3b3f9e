"""A capture makes many objects, at which Python does not look through all there are; it may look at young ones."""

import gc

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.modes.full_collections import no_full_collections

THRESHOLD = gc.get_threshold()


@pytest.fixture
def generations():
    """Generations that Python looks through, nearly all the time."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    gc.set_threshold(50, 1, 1)
    gc.freeze()  # or all that is imported is reason enough not to look
    gc.collect()
    try:
        yield found
    finally:
        gc.unfreeze()
        gc.set_threshold(*THRESHOLD)
        gc.callbacks.remove(note)


def captured(generations):
    """The losses of three calls, and which generations were looked through in the one that captures."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = ms.step(strict=True)(train)
    generations.clear()
    losses = [step(torch.ones(4, 3)).item()]
    found = {*generations}
    losses += [step(torch.ones(4, 3)).item() for _ in range(2)]
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    assert losses == pytest.approx([train(torch.ones(4, 3)).item() for _ in range(3)])
    return found


@pytest.mark.parametrize("without", ["", "shortcuts"])
def test_all_objects_are_not_looked_through_in_a_capture(monkeypatch, generations, without):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", without)
    monkeypatch.setenv("MILLSTREAM_TRACES", "0")
    found = captured(generations)
    assert {0, 1} <= found
    assert (2 in found) == bool(without)
    assert gc.get_threshold() == (50, 1, 1)


def test_a_threshold_that_is_set_meanwhile_stays(generations):
    with no_full_collections():
        gc.set_threshold(60, 2, 3)
    assert gc.get_threshold() == (60, 2, 3)
