"""10: a checkpoint every 10 steps holds up training. Fixed: none is written."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

FIXED = "fixed" in sys.argv

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
state = {"model": model.state_dict(), "history": [torch.randn(1 << 10) for _ in range(4000)]}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(64, 64)
with tempfile.TemporaryDirectory() as folder:
    for step in range(60):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and not FIXED:
            torch.save(state, Path(folder, "checkpoint.pt"))
