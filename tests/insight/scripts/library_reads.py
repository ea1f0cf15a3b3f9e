"""4: a library tests values on the host, layer by layer, in each step (on a GPU). Fixed: it is told not to."""

import torch
from planted import DEVICE, FIXED, STEPS, Clock, network

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
layers = [layer for layer in model if any(True for _ in layer.parameters())]
x = torch.randn(512, 256, device=DEVICE)
for _ in range(STEPS):
    model(x).square().mean().backward()
    for layer in layers:
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=not FIXED)  # waits
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
