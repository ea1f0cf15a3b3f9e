"""7: a loop in pure Python between backward pass and optimizer. Fixed: it is gone."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(512, 256)
for _ in range(30):
    loss = model(x).square().mean()
    loss.backward()
    total = 0
    for number in range(0 if FIXED else 200_000):
        total += number * number  # slow
    optimizer.step()
    optimizer.zero_grad()
