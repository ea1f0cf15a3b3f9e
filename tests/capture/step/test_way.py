"""How far one has to walk through the code to follow a steady call of a step."""

import torch
from torch import nn

import millstream as ms
from millstream.device import compiled_switches
from tests.file_changes import FileChanges


def test_a_steady_call_changes_file_at_most_fourteen_times():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    @ms.step(strict=True, engine="serial")
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(3, 4)
    for _ in range(4):
        step(x)
    compiled_switches.install()  # which happens in another thread, some time
    step(x)
    changes = FileChanges()
    try:
        assert changes.count(lambda: step(x)) <= 14, changes.ways
    finally:
        changes.close()
