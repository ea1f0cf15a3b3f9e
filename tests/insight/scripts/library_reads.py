"""4: a library tests values on the host, parameter by parameter, in each step (on a GPU). Fixed: it is told not to."""

import torch
from planted import BATCH, DEVICE, FIXED, STEPS, Clock, network

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
for _ in range(STEPS):
    model(x).square().mean().backward()
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=not FIXED)  # waits
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
