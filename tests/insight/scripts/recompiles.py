"""9: every new length is compiled again. Fixed: one compilation for all lengths. ``break``: a print in the middle."""

import sys

import torch
from planted import DEVICE, FIXED, ON_GPU, STEPS, Clock
from torch import nn

BREAKS = "break" in sys.argv
torch._dynamo.config.recompile_limit = 1000  # which would end it after a while


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.inner(x).relu()
        if BREAKS:
            print("shape", tuple(x.shape))  # breaks the graph
        return self.outer(x).square().mean()


model, clock = Model().to(DEVICE), Clock()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
compiled = torch.compile(model, dynamic=FIXED, backend="aot_eager")
for step in range(STEPS - 20 if ON_GPU else 12):
    length = 4 if BREAKS else 4 + step % (1000 if ON_GPU else 6)
    compiled(torch.randn(length, 16, device=DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()
    clock.tick()
clock.show()
