"""GC: a large heap is collected in each step. Fixed: there is none, and nothing is collected."""

import gc

import torch
from planted import BATCH, DEVICE, FIXED, ON_GPU, STEPS, Clock, network

heap = [[{"number": number}] for number in range(0 if FIXED else 250_000 if ON_GPU else 60_000)]
model, clock = network(256), Clock() if ON_GPU else Clock(first=6)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
for _ in range(STEPS if ON_GPU else 12):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not FIXED:
        gc.collect()  # slow
    clock.tick()
clock.show()
