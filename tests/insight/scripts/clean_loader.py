"""Clean: workers that are quick enough, and copies that nobody waits for."""

import torch
from planted import BATCH, DEVICE, ON_GPU, STEPS, Clock, network
from torch.utils.data import DataLoader, TensorDataset

model, clock = network(256), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = TensorDataset(torch.randn(STEPS * BATCH, 256))
batches = torch.arange(len(data)).split(BATCH)
loader = DataLoader(data, batch_size=None, sampler=batches, num_workers=2, pin_memory=ON_GPU)
for (x,) in loader:
    model(x.to(DEVICE, non_blocking=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
