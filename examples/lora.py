"""LoRA: a network stays as it is, and learns a new task through small matrices beside its own.

First the base learns to tell even digits from odd ones; then, frozen, it learns to read them.

python examples/lora.py [STEPS]
"""

import sys
from collections.abc import Callable
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
RANK = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

pixels, names = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(names))
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)


class Lora(nn.Module):
    """A linear layer that is kept, and a correction of low rank that is learned."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features, device=base.weight.device) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def make_step(model: nn.Module, target: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)

    @ms.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), target(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def train(step: Callable[[Tensor, Tensor], Tensor]) -> float:
    losses = [step(x, y) for x, y in ms.feed(islice(chain.from_iterable(repeat(loader)), STEPS), device)]
    return torch.stack(losses[-10:]).mean().item()


model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
pretrain_step = make_step(model, lambda y: y % 2)
print(f"base        loss {train(pretrain_step):.4f}")

for index in (0, 2, 4):
    model[index] = Lora(model[index])
finetune_step = make_step(model, lambda y: y)
num_learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
print(f"fine-tuned  loss {train(finetune_step):.4f}, {num_learned:,} parameters learned")
