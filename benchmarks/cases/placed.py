"""Networks with parts for several devices, and one that is larger than what each may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.cases.models import ADAMW, Inference, InferenceCase, Training, TrainingCase, language, shape
from benchmarks.cases.networks import TransformerBlock, small_inception

# --- networks --------------------------------------------------------------------------------------------------------


def blocks(depth: int, width: int) -> nn.Sequential:
    """A stack of transformer blocks, without a mask."""
    return nn.Sequential(*(TransformerBlock(width, max(width // 64, 1), causal=False) for _ in range(depth)))


class Ensemble(nn.Module):
    """Stacks of transformer blocks over one input, and the mean of what they say."""

    def __init__(self, num_parts: int, depth: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(blocks(depth, width) for _ in range(num_parts))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).mean(1) for part in self.parts]).mean(0)


class Distillation(nn.Module):
    """A student's distance from a teacher of its size, which is in bfloat16 and is not trained."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.student = blocks(depth, width)
        self.teacher = blocks(depth, width).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            wanted = self.teacher(x.to(next(self.teacher.parameters()).dtype))
        return F.mse_loss(self.student(x).float(), wanted.float())


class LlamaBlock(nn.Module):
    """Pre-norm attention with rotary positions, and SwiGLU (Touvron et al., 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): pairs of numbers turned by the angles of their position."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Llama(nn.Module):
    """A decoder as Llama has it, for training."""

    def __init__(self, depth: int, width: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("turn", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        return self.head(self.norm(x))


def inception(small: bool) -> nn.Module:
    """Inception-v3 of torchvision; a tiny one has four blocks like those of it."""
    if small:
        return small_inception(width=8)
    import torchvision

    return torchvision.models.inception_v3(weights=None, init_weights=False, transform_input=False)


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistillationCase(TrainingCase):
    """A network that gives its loss itself."""

    def make(self, device: torch.device, *, tiny: bool = False) -> Training:
        problem = super().make(device, tiny=tiny)
        return _Distilled(self, problem.model, problem.batches, device)


class _Distilled(Training):
    def make_step(self, model: Any, optimizer: Optimizer, *, precise: bool = False) -> Callable[..., Tensor]:
        kind, dtype = self.device.type, self.dtype

        def step(x: Tensor) -> Tensor:
            with torch.autocast(kind, dtype, enabled=not precise):
                loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step


@dataclass(frozen=True)
class PlacedCase:
    """What is to run on several devices.

    Attributes:
        case: To be run.
        share: Of the temporaries and outputs of one device, that each of several may have; ``None`` sets no bound.
    """

    case: InferenceCase | TrainingCase
    share: float | None = None

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def estimate_s(self) -> float:
        return self.case.estimate_s

    def make(self, device: torch.device, *, tiny: bool = False) -> Inference | Training:
        """Make the network and its batches; images in channels_last."""
        if isinstance(self.case, InferenceCase):
            return self.case.make(device, tiny=tiny, channels_last=True)
        return self.case.make(device, tiny=tiny)


def ensemble(num_parts: int, depth: int, small: bool) -> nn.Module:
    return Ensemble(num_parts, depth, 64 if small else 1024)


tokens_of_1024 = shape(8, 512, 1024, tiny=(4, 32, 64))

PLACED = (
    PlacedCase(
        InferenceCase("two towers b8", partial(ensemble, 2, 4), tokens_of_1024, torch.bfloat16, estimate_s=35),
    ),
    PlacedCase(
        InferenceCase("ensemble of four b8", partial(ensemble, 4, 2), tokens_of_1024, torch.bfloat16, estimate_s=35),
    ),
    PlacedCase(
        DistillationCase(
            "teacher and student b16",
            lambda small: Distillation(1, 64) if small else Distillation(3, 1024),
            shape(16, 512, 1024, tiny=(4, 32, 64)),
            torch.optim.SGD,
            {"lr": 1e-2},
            estimate_s=40,
        )
    ),
    PlacedCase(InferenceCase("inception_v3 b1", inception, shape(1, 3, 299, 299, tiny=(1, 3, 32, 32)), estimate_s=40)),
    PlacedCase(
        TrainingCase(
            "llama b16 T512 in two thirds",
            lambda small: Llama(2, 64, 2, 64, 32) if small else Llama(8, 1024, 16, 4096, 512),
            lambda small: language(64 if small else 4096, 16, 512, tiny=(8, 32))(small),
            torch.optim.AdamW,
            ADAMW,
            estimate_s=50,
        ),
        share=2 / 3,
    ),
)
