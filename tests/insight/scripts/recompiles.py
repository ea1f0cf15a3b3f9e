"""9: every new length is compiled anew. Fixed: one compilation for all lengths. ``break``: a print in the middle."""

import sys

import torch
from torch import nn

FIXED, BREAKS = "fixed" in sys.argv, "break" in sys.argv


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.inner(x).relu()
        if BREAKS:
            print("shape", tuple(x.shape))  # breaks the graph
        return self.outer(x).square().mean()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
compiled = torch.compile(model, dynamic=FIXED, backend="aot_eager")
for step in range(12):
    length = 4 if BREAKS else 4 + step % 6
    compiled(torch.randn(length, 16)).backward()
    optimizer.step()
    optimizer.zero_grad()
