"""5: a large batch is copied from memory that is not pinned (to a GPU). Fixed: it is pinned, and nobody waits."""

import torch
from planted import BATCH, DEVICE, FIXED, ON_GPU, STEPS, Clock, network

model, clock = network(4096), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batch = torch.zeros(8192 if ON_GPU else 64, 4096)
if FIXED and ON_GPU:
    batch = batch.pin_memory()
for _ in range(STEPS):
    x = batch.to(DEVICE, non_blocking=FIXED)  # copies
    loss = model(x[:BATCH]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
