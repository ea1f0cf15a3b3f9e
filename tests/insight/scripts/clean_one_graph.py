"""Clean: a step of ms.step, which is one graph."""

import torch
from planted import DEVICE, STEPS, Clock, network

import millstream as ms

model, clock = network(256, depth=16), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(1024, 256, device=DEVICE)


@ms.step
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(STEPS):
    step(x)
    clock.tick()
clock.show()
