"""Small networks of the kinds that the library must handle, and how to compare two runs of them."""

import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables


class Mlp(nn.Module):
    example = (8, 16)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    example = (4, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        return self.head(self.blocks(x).mean((2, 3)))


class Inception(nn.Module):
    """Two blocks of parallel branches that end in a concatenation."""

    example = (2, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Conv2d(8, 2, 1),
                    nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)),
                    nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2)),
                    nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(8, 2, 1)),
                ]
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.branches:
            x = F.relu(torch.cat([branch(x) for branch in block], dim=1))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    example = (2, 6, 16)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Lstm(nn.Module):
    """A custom cell: no library has a kernel for it."""

    example = (4, 5, 8)

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(8, 64)
        self.hidden = nn.Linear(16, 64)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            i, f, g, o = (self.inputs(x[:, t]) + self.hidden(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


ALL = (Mlp, ResNet, Inception, Transformer, Lstm)


def example(kind, device="cpu", batch=None):
    """Fresh random input for a network and labels for its four classes."""
    shape = kind.example if batch is None else (batch, *kind.example[1:])
    return torch.randn(shape, device=device), torch.randint(0, 4, shape[:1], device=device)


def train_once(model, optimizer, x, y):
    """One training step on a batch for classification; returns its loss."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def lowered(model, *inputs):
    """The program of a model's inference, and its flat inputs as the engine gets them."""
    seen = []
    compiled = ms.compile(model, engine="serial", strict=True)
    compiled(*inputs)
    engine = executables(compiled)[0]
    run = engine._run

    def spy(values):
        seen.append(list(values))
        return run(values)

    engine._run = spy
    expected = compiled(*inputs)
    return engine.lowered, seen[0], expected


def assert_close(ours, theirs, tolerance=1e-5):
    """Compare two trees of tensors by ‖a − b‖ ≤ tolerance · max(‖b‖, 1); NaN never passes."""
    ours, theirs = (torch.utils._pytree.tree_leaves(tree) for tree in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            a, b = a.detach().double(), b.detach().double()
            assert (a - b).norm() <= tolerance * max(b.norm().item(), 1.0)
        else:
            assert a == b


def optimizer_state(optimizer):
    """Tensors of an optimizer's state, in a fixed order."""
    state = optimizer.state_dict()["state"]
    return [
        value for key in sorted(state) for _, value in sorted(state[key].items()) if isinstance(value, torch.Tensor)
    ]
