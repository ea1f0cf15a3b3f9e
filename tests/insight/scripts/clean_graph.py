"""Clean: replays of a CUDA graph of 4,000 small kernels, batch after batch."""

import torch
from planted import DEVICE, ON_GPU, STEPS, Clock
from torch.utils.data import DataLoader, TensorDataset

state, clock = torch.zeros(1 << 21, device=DEVICE), Clock()


def work():
    for _ in range(4000 if ON_GPU else 200):
        state.add_(1.0)


step = work
if ON_GPU:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    step = graph.replay
for _ in DataLoader(TensorDataset(torch.zeros(STEPS)), batch_size=1):
    step()
    clock.tick()
clock.show()
