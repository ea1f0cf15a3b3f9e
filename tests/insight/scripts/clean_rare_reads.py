"""Clean: the loss is read every 25 steps, and a wait in each step finds the next step queued."""

import torch
from planted import DEVICE, ON_GPU, STEPS, Clock, network

model, clock = network(256, depth=16), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(1024, 256, device=DEVICE)
events = []
for step in range(STEPS):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 24:
        loss.item()
    if ON_GPU:
        events.append(torch.cuda.Event())
        events[-1].record()
        if len(events) > 1:
            events[-2].synchronize()  # of the step before: this one is queued
    clock.tick()
clock.show()
