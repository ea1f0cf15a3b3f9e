"""Cases of suite ``control`` on sequences: sampling from a decoder within a loop, and a block with a parallel scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop


class Decoder(nn.Module):
    """A small GPT that continues prompts in one loop, with a cache of fixed length, until all have met the end token.

    What is drawn is multiplied by a buffer that is zero here, so that all sides sample the same; no compiler knows.
    Each token has one that is far likelier than others to come next, as after training, so that rounding changes none.
    Scores are returned, which show the text and what the layers make of it.
    """

    def __init__(self, vocab: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.first, self.second = (nn.ModuleList(nn.LayerNorm(width) for _ in range(depth)) for _ in range(2))
        self.mixed = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.joined = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight)
        self.head.weight.data = self.tokens.weight.data.roll(1, 0) * width**-0.5
        self.register_buffer("heat", torch.zeros(()))
        self.register_buffer("end", torch.tensor(-1))  # which is never met here

    def forward(self, prompt: Tensor) -> Tensor:
        """Scores of (batch, length): of each token of prompts of (batch, tokens), continued to ``length``."""
        batch, given = prompt.shape
        shape = len(self.mixed), batch, self.heads, self.length, self.head.in_features // self.heads
        keys = self.head.weight.new_zeros(shape)
        text = F.pad(prompt, (0, self.length - given))
        start = torch.zeros((), dtype=torch.int64, device=prompt.device)

        def goes_on(place: Tensor, token: Tensor, *_: Tensor) -> Tensor:
            return (place < self.length - 1) & (token != self.end).any()

        def turn(
            place: Tensor, token: Tensor, text: Tensor, told: Tensor, keys: Tensor, values: Tensor
        ) -> tuple[Tensor, ...]:
            scores, keys, values = self._step(place, token, keys, values)
            noise = -(-torch.rand_like(scores).clamp_min(1e-20).log()).clamp_min(1e-20).log()
            new = (scores + self.heat * noise).argmax(-1)
            here = place.view(1) + 1
            new = torch.where(here < given, text.index_select(1, here).squeeze(1), new)
            told = told.index_copy(1, here, scores.gather(1, new.unsqueeze(1)))
            return place + 1, new, text.index_copy(1, here, new.unsqueeze(1)), told, keys, values

        carried = start, prompt[:, 0].clone(), text, keys.new_zeros(text.shape), keys, keys.clone()
        return while_loop(goes_on, turn, carried)[3]

    def _step(self, place: Tensor, token: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the next token, and the caches with this one."""
        here = place.view(1)
        x = self.tokens(token) + self.places(here)
        seen = torch.arange(self.length, device=token.device) <= place
        kept: list[list[Tensor]] = [[], []]
        for number, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            query, key, value = self.mixed[number](first(x)).view(len(x), 3, self.heads, 1, -1).unbind(1)
            kept[0].append(keys[number].index_copy(2, here, key))
            kept[1].append(values[number].index_copy(2, here, value))
            weights = (query @ kept[0][-1].transpose(-1, -2)) * query.shape[-1] ** -0.5
            weights = weights.masked_fill(~seen, float("-inf")).softmax(-1)
            x = x + self.joined[number]((weights @ kept[1][-1]).flatten(1))
            x = x + self.narrow[number](F.gelu(self.wide[number](second(x))))
        return self.head(self.last(x)), torch.stack(kept[0]), torch.stack(kept[1])


class Mamba(nn.Module):
    """A selective state-space block over a sequence, as a parallel scan, and a head on its mean."""

    def __init__(self, width: int, inner: int, states: int, classes: int = 10) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.near = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.selected, self.steps = (
            nn.Linear(inner, 2 * states + inner // 16, bias=False),
            nn.Linear(inner // 16, inner),
        )
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.skip, self.outputs = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)
        self.head, self.states = nn.Linear(width, classes), states

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (batch, steps, width)."""
        here, gate = self.inputs(self.norm(x)).chunk(2, -1)
        here = F.silu(self.near(here.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        into, out, step = self.selected(here).split([self.states, self.states, here.shape[-1] // 16], -1)
        step = F.softplus(self.steps(step)).unsqueeze(-1)
        kept = (-step * self.decay.exp()).exp()
        added = step * into.unsqueeze(2) * here.unsqueeze(-1)
        _, state = associative_scan(_after, (kept, added), dim=1, combine_mode="generic")
        y = (state * out.unsqueeze(2)).sum(-1) + self.skip * here
        return self.head((x + self.outputs(y * F.silu(gate))).mean(1))


def _after(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One linear recurrence after another."""
    return left[0] * right[0], right[0] * left[1] + right[1]
