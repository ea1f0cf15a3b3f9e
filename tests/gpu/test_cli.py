"""The command line on a GPU: the same losses as eager, and checkpoints that resume exactly."""

import pytest
import torch
from torch.utils._pytree import tree_flatten

from millstream.cli import main

pytestmark = pytest.mark.gpu

JOBS = ["char-rnn --layers 2 --hidden 32 --sequence 8 --batch 4 --sample 30", "digits --width 4 --batch 32"]


@pytest.mark.parametrize("job", JOBS)
def test_train_and_resume(job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = ["train", *job.split(), "--device", "cuda"]
    assert main([*train, "--steps", "12", "--checkpoint", "whole.pt"]) == 0
    assert "losses of 12 steps agree" in capsys.readouterr().out
    assert main([*train, "--steps", "6", "--checkpoint", "half.pt"]) == 0
    assert main([*train, "--steps", "6", "--checkpoint", "both.pt", "--resume", "half.pt"]) == 0
    whole, both = (tree_flatten(torch.load(path, weights_only=True))[0] for path in ("whole.pt", "both.pt"))
    for ours, theirs in zip(both, whole, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
