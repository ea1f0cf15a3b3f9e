"""Suite ``decode``: text a token at a time.

- ``1B decoder``: one token of a decoder with 1.1 billion random weights in bf16 and a cache of fixed size. One more
  baseline is what no side can be faster than: reading as many bytes as the weights are, once.
- ``generate``: a small GPT-2 and a Llama of that size, through ``generate``, as suite ``shapes`` measures it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.cases.models import Inference, InferenceCase
from benchmarks.measuring.baselines import InferenceJudge, build_inference
from benchmarks.measuring.equality import Comparison
from benchmarks.measuring.ours import build_inference as build_ours
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import Side, build_each, compare
from benchmarks.measuring.suite import Settings, run_suite

BASELINES = ("compile reduce-overhead", "inductor graph")
POSITION = 511  # of the token, in a cache that is full before it


class Layer(nn.Module):
    """Attention with fewer heads for keys and values (Ainslie et al., 2023), and SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.register_buffer("keys", torch.randn(1, kv_heads, length, self.size))
        self.register_buffer("values", torch.randn(1, kv_heads, length, self.size))

    def forward(self, x: Tensor, position: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        rows = self.qkv(self.before(x)).view(1, 1, -1, self.size).transpose(1, 2)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, turn), rotate(k, turn)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        q = q.view(1, self.kv_heads, -1, self.size)  # heads that share keys stand in a row, as positions would
        found = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(found.reshape(x.shape))
        gate, value = self.up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): pairs of numbers turned by the angles of a position."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Decoder(nn.Module):
    """Maps a token and its position to logits of the next one; keys and values of those before are in the cache."""

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, inner: int, vocab: int, length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, inner, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        self.register_buffer("pairs", torch.arange(width // heads // 2))
        self.register_buffer("places", torch.arange(length))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        mask = (self.places <= position).view(1, 1, 1, -1)
        turn = position * 10000.0 ** -(self.pairs / len(self.pairs))
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x, position, turn, mask)
        return self.head(self.norm(x))


def decoder(small: bool) -> nn.Module:
    """As large as TinyLlama: 22 layers of 2048."""
    if small:
        return Decoder(layers=2, width=64, heads=4, kv_heads=2, inner=96, vocab=100, length=POSITION + 1)
    return Decoder(layers=22, width=2048, heads=32, kv_heads=4, inner=5632, vocab=32000, length=1024)


def token_and_position(small: bool) -> tuple[Tensor, ...]:
    """One token of a text."""
    return torch.randint(100 if small else 32000, (1, 1)), torch.tensor([POSITION])


ONE_TOKEN = InferenceCase("1B decoder", decoder, token_and_position, torch.bfloat16, estimate_s=150)


def reading(problem: Inference) -> Side:
    """A pass over as many bytes as the model's weights are."""
    num_bytes = sum(each.numel() * each.element_size() for each in problem.model.parameters())
    memory = torch.ones(num_bytes // 4, dtype=torch.float32, device=problem.device)
    return Side("reading the weights", Comparison(True, 0.0), memory.sum, memory.sum)


@torch.no_grad()
def run_case(case: Any, settings: Settings) -> list[Row]:
    """Build, judge and time all sides of a case."""
    if case is not ONE_TOKEN:
        with torch.enable_grad():
            return shapes.run_case(case, settings)
    problem = case.make(settings.device, tiny=settings.tiny)
    judge = InferenceJudge(problem)
    mine = build_ours(problem, judge, freeze=settings.freeze)
    asked = [name for name in BASELINES if settings.wants(name)]
    peers = build_each(asked, lambda name: build_inference(problem, name, judge, plan_memory=False))
    return compare(case.name, mine, [*peers, reading(problem)], settings)


CASES: tuple[Any, ...] = (ONE_TOKEN, *(case for case in shapes.CASES if case.name.startswith("generate ")))

if __name__ == "__main__":
    sys.exit(run_suite("decode", CASES, run_case))
