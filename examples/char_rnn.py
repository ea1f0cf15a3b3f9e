"""A character LSTM, written as a custom cell, learns the source of Python's standard library: eager and as one graph.

Unrolled, it is some hundred small kernels in a row: what a GPU runs worst one launch at a time. Both begin with the
same weights and see the same batches, so that losses and speeds can be compared.

python examples/char_rnn.py [STEPS]
"""

import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
BATCH, LENGTH, HIDDEN = 32, 24, 128
device = "cuda" if torch.cuda.is_available() else "cpu"

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


def windows() -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(STEPS):
        start = step * LENGTH % (rows.shape[1] - LENGTH - 1)
        yield rows[:, start : start + LENGTH], rows[:, start + 1 : start + LENGTH + 1]


def make_step() -> Callable[..., tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = CharRnn().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

    def train_step(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, h, c = model(x, h, c)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), h.detach(), c.detach()  # the state continues into the next window

    return train_step


class Run:
    def __init__(self, step: Callable[..., tuple[Tensor, ...]]) -> None:
        self.step = step
        self.state = [torch.zeros(BATCH, HIDDEN, device=device)] * 2
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        loss, *self.state = self.step(x, y, *self.state)
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def ms_per_step(self) -> float:
        return 1e3 * median(self.seconds[STEPS // 2 :])  # compiled and warm by then


train_step = ms.step(make_step())
eager, graph = Run(make_step()), Run(train_step)
for step, (x, y) in enumerate(ms.feed(windows(), device)):
    eager.train(x, y)  # in turn: whatever else the machine does slows both
    graph.train(x, y)
    if step % 50 == 0:
        print(f"step {step:4}  loss {graph.losses[-1]:.4f}")

print(ms.explain(train_step).text().splitlines()[0])
print(f"on {device}: {eager.ms_per_step:.1f} ms a step eager, {graph.ms_per_step:.1f} ms as one graph")
torch.testing.assert_close(graph.losses[:20], eager.losses[:20], rtol=1e-3, atol=0)  # later, rounding has grown
print("losses agree")
