"""Metrics without stopping: losses and accuracies are read while later steps run.

``loss.item()`` waits until the device is done, and it idles until the host has launched again. ``ms.fetch`` copies the
value in the background and gives a future.

python examples/metrics.py [STEPS]
"""

import sys
from collections import deque
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

pixels, names = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(names))
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


@ms.step
def train_step(x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    right = (scores.argmax(1) == y).float().mean()
    return torch.stack([loss.detach(), right])


pending: deque = deque()
recent: deque = deque(maxlen=20)  # losses and shares of right answers


def read(step: int, future: Any) -> None:
    recent.append(future.result())
    if step % 100 == 0:
        loss, right = torch.stack(list(recent)).mean(0).tolist()
        print(f"step {step:4}  loss {loss:.4f}  right {right:.1%}")


batches = islice(chain.from_iterable(repeat(loader)), STEPS)
for step, (x, y) in enumerate(ms.feed(batches, device)):
    pending.append((step, ms.fetch(train_step(x, y))))
    while pending and (pending[0][1].done() or len(pending) > 8):  # what has arrived; at most 8 on their way
        read(*pending.popleft())
for step, future in pending:
    read(step, future)
