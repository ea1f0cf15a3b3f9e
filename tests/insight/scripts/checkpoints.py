"""10: a checkpoint every 10 steps holds up training. Fixed: none is written."""

import tempfile
from pathlib import Path

import torch
from planted import BATCH, DEVICE, FIXED, ON_GPU, STEPS, Clock, network

model, clock = network(256), Clock()
state = {"model": model.state_dict()}
if not ON_GPU:
    state["history"] = [torch.randn(1 << 10) for _ in range(4000)]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(BATCH, 256, device=DEVICE)
with tempfile.TemporaryDirectory() as folder:
    for step in range(STEPS if ON_GPU else 60):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and not FIXED:
            torch.save(state, Path(folder, "checkpoint.pt"))
        clock.tick()
    clock.show()
