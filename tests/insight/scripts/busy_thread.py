"""GIL: a thread of pure Python beside training. Fixed: it sleeps."""

import sys
import threading
import time

import torch
from planted import DEVICE, FIXED, ON_GPU, STEPS, Clock, network

stopped = threading.Event()
if ON_GPU:
    sys.setswitchinterval(5e-4)  # each operator waits for as long: a step would take most of a second


def count():
    number = 0
    while not stopped.is_set():
        number += 1  # greedy
        if FIXED:
            stopped.wait(1.0)


thread = threading.Thread(target=count)
thread.start()
model, clock = network(64), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(64, 64, device=DEVICE)
step, end = 0, time.monotonic() + (0 if ON_GPU else 4)  # a CPU may let either thread wait for long
while step < STEPS or time.monotonic() < end:
    step += 1
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
stopped.set()
thread.join()
