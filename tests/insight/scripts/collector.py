"""GC: a large heap is collected in each step. Fixed: there is none, and nothing is collected."""

import gc
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

heap = [[{"number": number}] for number in range(0 if FIXED else 60_000)]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(64, 64)
for _ in range(12):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not FIXED:
        gc.collect()  # slow
