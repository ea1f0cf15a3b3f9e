"""1: workers make batches more slowly than steps take them. Fixed: nothing slow is left in an item."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "fixed" in sys.argv


class Images(Dataset):
    def __len__(self):
        return 4 * 40

    def __getitem__(self, index):
        if not FIXED:
            time.sleep(0.005)
        return torch.full((256,), float(index % 7))


model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for x in DataLoader(Images(), batch_size=4, num_workers=1):  # waits
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
