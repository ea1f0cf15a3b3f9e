"""7: a loop in pure Python between backward pass and optimizer. Fixed: it is gone."""

import torch
from planted import BATCH, DEVICE, FIXED, ON_GPU, STEPS, Clock, network

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
for _ in range(STEPS):
    loss = model(x).square().mean()
    loss.backward()
    if ON_GPU:
        loss.item()  # the loop needs what was computed
    total = 0
    for number in range(0 if FIXED else 200_000):
        total += number * number  # slow
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
