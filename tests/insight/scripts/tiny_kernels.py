"""6: hundreds of tiny kernels, each launched by itself (on a GPU). Fixed: the step is one CUDA graph."""

import torch
from planted import DEVICE, FIXED, ON_GPU, STEPS, Clock
from torch import nn

model = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False, capturable=ON_GPU)
x = torch.randn(16, 64, device=DEVICE)
clock = Clock()


def step():
    loss = model(x).square().mean()  # launches
    loss.backward()  # launches
    optimizer.step()  # launches
    optimizer.zero_grad(set_to_none=False)  # launches


if FIXED and ON_GPU:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    step = graph.replay
for _ in range(STEPS):
    step()
    clock.tick()
clock.show()
