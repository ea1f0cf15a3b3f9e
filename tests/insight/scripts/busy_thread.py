"""GIL: a thread of pure Python beside training. Fixed: it sleeps."""

import sys
import threading

import torch
from torch import nn

FIXED = "fixed" in sys.argv
stopped = threading.Event()


def count():
    number = 0
    while not stopped.is_set():
        number += 1  # greedy
        if FIXED:
            stopped.wait(1.0)


thread = threading.Thread(target=count)
thread.start()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(64, 64)
for _ in range(1000):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
stopped.set()
thread.join()
