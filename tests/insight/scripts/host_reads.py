"""3: values are read in each step: the loss, a mask, a printed tensor, norms (on a GPU). Fixed: they stay there."""

import torch
from planted import BATCH, DEVICE, FIXED, STEPS, Clock, network

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
sums = torch.zeros(3, device=DEVICE)


def read(value):
    return value if FIXED else value.item()  # waits


for _ in range(STEPS):
    y = model(x)
    loss = y.square().mean()
    if not FIXED and (y > 100).any():  # waits
        break
    total = read(loss)
    loss.backward()
    sums += loss.detach()
    if not FIXED:
        print(sums)  # waits
    sizes = [(read(each.grad.norm()), read(each.norm())) for each in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
