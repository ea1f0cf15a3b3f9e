"""4: a library checks values on the host, in each step (on a GPU). Fixed: it is told not to."""

import torch
from planted import DEVICE, FIXED, STEPS, Clock, network
from torch.distributions import Normal

model, clock = network(256, depth=3), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(512, 256, device=DEVICE)
for _ in range(STEPS):
    y = model(x)
    loss = 0.0
    for scale in range(1, 5):
        noise = Normal(y, torch.full_like(y, scale), validate_args=not FIXED)  # waits
        loss = loss - noise.log_prob(torch.zeros_like(y)).mean()  # waits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
