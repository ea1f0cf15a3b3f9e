"""8: the allocator's memory is given back in each step (on a GPU), and taken again. Fixed: it is kept."""

import torch
from planted import BATCH, DEVICE, FIXED, ON_GPU, STEPS, Clock, network

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
for _ in range(STEPS):
    scratch = [torch.empty(1 << 25 if ON_GPU else 1, dtype=torch.uint8, device=DEVICE) for _ in range(40)]  # takes
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del scratch, loss
    if ON_GPU and not FIXED:
        torch.cuda.empty_cache()  # gives back
    clock.tick()
clock.show()
