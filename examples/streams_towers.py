"""Two towers side by side: at once, and as hints for a captured training step.

python examples/streams_towers.py [STEPS]
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 50
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def tower(fan_in: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(fan_in, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))


class Matching(nn.Module):
    """Learns which image belongs to which text."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(784), tower(300)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        left, right = ms.manual.parallel([lambda: self.image(image), lambda: self.text(text)], device=image.device)
        scores = F.normalize(left) @ F.normalize(right).t() / 0.1
        return F.cross_entropy(scores, torch.arange(len(image), device=image.device))


model = Matching().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
image, text = torch.randn(32, 784, device=device), torch.randn(32, 300, device=device)

print(f"eager, each tower on a stream: {model(image, text).item():.3f}")


@ms.step(streams="manual")  # the streams that are written down; "auto" would time others, too
def train_step(image: Tensor, text: Tensor) -> Tensor:
    loss = model(image, text)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for step in range(STEPS):
    loss = train_step(image, text)
    if step % 10 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}")
