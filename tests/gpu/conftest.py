import pytest
import torch


@pytest.fixture
def exact(monkeypatch):
    """Numbers that can be compared bit by bit: no TF32, no algorithm of cuDNN's that varies."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
