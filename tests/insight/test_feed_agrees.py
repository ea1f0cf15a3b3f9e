"""``feed.stats()`` and ``ms.profile`` say the same of one loop."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import millstream as ms
from millstream.insight import Cause


class Slow(Dataset):
    def __len__(self):
        return 4 * 25

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((64,), float(index % 7))


@pytest.mark.parametrize("options", [{}, {"prefetch": False}])
def test_share_of_waiting_for_data_agrees_within_five_points(options):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with ms.profile() as run, ms.feed(DataLoader(Slow(), batch_size=4), "cpu", **options) as feed:
        for x in feed:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        said = feed.stats().shares["source"]
    found = run.findings
    waited = sum(found.idle_by_cause.get(cause, 0) for cause in (Cause.DATA_WAIT, Cause.IN_PROCESS)) / found.window_ns
    assert waited == pytest.approx(said, abs=0.05)
    assert found.leading.cause in (Cause.DATA_WAIT, Cause.IN_PROCESS)
