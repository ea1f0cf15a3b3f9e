"""Two ranks (Gloo, under torchrun): the second one sleeps before each collective."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(64, 64)
for _ in range(20):
    model(x).square().mean().backward()
    if os.environ["RANK"] == "1":
        time.sleep(0.02)  # late
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
