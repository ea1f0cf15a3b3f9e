"""Clean: workers that are quick enough."""

import torch
from planted import DEVICE, STEPS, Clock, network
from torch.utils.data import DataLoader, TensorDataset

model, clock = network(256, depth=16), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = TensorDataset(torch.randn(STEPS * 1024, 256))
loader = DataLoader(data, batch_size=None, sampler=torch.arange(len(data)).split(1024), num_workers=2)
for (x,) in loader:
    model(x.to(DEVICE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
