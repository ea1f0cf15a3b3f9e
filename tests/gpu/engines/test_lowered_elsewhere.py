"""On a GPU, too, a step that another process has lowered is replayed as one graph."""

import itertools
import time

import pytest
import torch

import millstream as ms
from millstream.capture.kept import elsewhere
from tests.processes import bring_compiled_code

pytestmark = pytest.mark.gpu


def test_calls_are_eager_until_another_process_has_lowered_the_step(monkeypatch, tmp_path):
    bring_compiled_code(tmp_path)
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    monkeypatch.setattr(elsewhere._jobs, "tried", set())
    monkeypatch.setattr("millstream.lower.compile.compile_fx", None)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    @ms.step(tune="background", strict=True)
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 64, device="cuda")
    losses = [train_step(x) for _ in range(4)]
    assert not train_step.graphs
    while any(not job.is_over for job in train_step._jobs.values()):
        time.sleep(0.1)
    losses += [train_step(x) for _ in range(4)]
    assert len(train_step.graphs) == 1
    assert all(later < before for before, later in itertools.pairwise(losses))
