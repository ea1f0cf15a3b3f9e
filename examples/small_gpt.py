"""A small GPT: batches fed ahead, gradient clipping, and checkpoints from which training continues exactly.

python examples/small_gpt.py [STEPS] [CHECKPOINT]     # an existing checkpoint is resumed
"""

import string
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
CHECKPOINT = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()) / "gpt.pt"
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(string.__file__).parent.glob("t*.py")))


class Windows(Dataset[Tensor]):
    codes = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.codes) // LENGTH - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index * LENGTH : (index + 1) * LENGTH + 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight)))


model = Gpt().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
shuffle = torch.Generator().manual_seed(0)
loader = DataLoader(Windows(), batch_size=16, shuffle=True, drop_last=True, generator=shuffle)
batches = ms.feed(loader, device, depth=2)  # two batches ahead; its position is part of a checkpoint
done = 0

if CHECKPOINT.exists():
    state = torch.load(CHECKPOINT, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.load_state_dict(state["batches"])
    done = state["done"]


@ms.step
def train_step(tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


end = done + STEPS
while done < end:
    for batch in batches:
        loss = train_step(batch)
        done += 1
        if done % 20 == 0 or done == end:
            print(f"step {done:4}  loss {loss.item():.4f}")
        if done == end:
            break

state = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "batches": batches.state_dict(),
    "done": done,
}
torch.save(state, CHECKPOINT)
print(f"saved {CHECKPOINT.name} after step {done}")
