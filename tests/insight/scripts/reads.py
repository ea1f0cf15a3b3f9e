"""3 and 4: the loss is read, a tensor printed, a mask tested and used as an index, in each step."""

import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
losses = []
for _ in range(5):
    x = torch.randn(16, 8)
    y = model(x)
    loss = y.square().mean()
    loss.backward()
    losses.append(loss.item())  # 5 reads
    if (y > 100).any():  # 5 reads
        break
    kept = y[y > 0]  # 5 sizes
    rows = y.detach().tolist()  # 5 reads of a tensor
    host = loss.detach().cpu()  # 5 reads of a tensor
    optimizer.step()
    optimizer.zero_grad()
