"""Mixed precision: autocast and a GradScaler inside the step, gradients accumulated over two halves of a batch.

float16 with a scaler on a GPU; bfloat16 on a CPU, where a scaler has nothing to do and is left off.

python examples/mixed_precision.py [STEPS]
"""

import sys
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)

pixels, names = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(names))
loader = DataLoader(data, batch_size=128, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")


@ms.step
def train_step(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), device=x.device)
    for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
        with torch.autocast(device, dtype):
            loss = F.cross_entropy(model(half_x), half_y) / 2
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # left out, in the graph, where a gradient is not finite
    scaler.update()
    optimizer.zero_grad()
    return total


batches = islice(chain.from_iterable(repeat(loader)), STEPS)
for step, (x, y) in enumerate(ms.feed(batches, device)):
    loss = train_step(x, y)
    if step % 50 == 0:
        print(f"step {step:4}  loss {loss.item():.4f}  scale {scaler.get_scale():.0f}")
