"""A character LSTM, written as a custom cell, learns the source of Python's standard library.

Unrolled, it is some hundred small kernels in a row: what a GPU runs worst one launch at a time.

python examples/char_rnn.py [STEPS]
"""

import string
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
BATCH, LENGTH, HIDDEN = 32, 24, 128
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(string.__file__).parent.glob("t*.py")))
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(character) for character in text])
rows = codes[: len(codes) // BATCH * BATCH].view(BATCH, -1)


class Cell(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        enter, forget, leave, value = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = forget.sigmoid() * c + enter.sigmoid() * value.tanh()
        return leave.sigmoid() * c.tanh(), c


class CharRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(alphabet), HIDDEN)
        self.cell = Cell(HIDDEN, HIDDEN)
        self.decode = nn.Linear(HIDDEN, len(alphabet))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tops = []
        for character in self.embed(x).unbind(1):
            h, c = self.cell(character, h, c)
            tops.append(h)
        return self.decode(torch.stack(tops, dim=1)), h, c


model = CharRnn().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)


@ms.step
def train_step(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores, h, c = model(x, h, c)
    loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss, h, c  # the state continues into the next window


def windows() -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(STEPS):
        start = step * LENGTH % (rows.shape[1] - LENGTH - 1)
        yield rows[:, start : start + LENGTH], rows[:, start + 1 : start + LENGTH + 1]


h = c = torch.zeros(BATCH, HIDDEN, device=device)
for step, (x, y) in enumerate(ms.feed(windows(), device)):
    loss, h, c = train_step(x, y, h, c)
    if step % 50 == 0:
        print(f"step {step:4}  loss {loss.item():.4f}")
print(ms.explain(train_step).text().splitlines()[0])
