"""A small convolutional network learns scikit-learn's digits: forward, backward and optimizer in one graph.

python examples/digits_cnn.py [STEPS]
"""

import sys
from itertools import chain, islice, repeat

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
images = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)
digits = torch.tensor(names)
loader = DataLoader(TensorDataset(images[:1437], digits[:1437]), batch_size=64, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


@ms.step
def train_step(x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


batches = islice(chain.from_iterable(repeat(loader)), STEPS)  # epochs, one after another
for step, (x, y) in enumerate(ms.feed(batches, device)):
    loss = train_step(x, y)
    scheduler.step()  # the learning rate is read again by every call
    if step % 100 == 0:
        print(f"step {step:4}  loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    right = model(images[1437:].to(device)).argmax(1).cpu() == digits[1437:]
print(f"right on {right.float().mean():.1%} of {len(right)} images it has never seen")
