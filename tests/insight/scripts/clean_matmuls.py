"""Clean: large matrices, nothing to win."""

import torch
from planted import DEVICE, STEPS, Clock, network

model, clock = network(256, depth=16), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(1024, 256, device=DEVICE)
for _ in range(STEPS):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
