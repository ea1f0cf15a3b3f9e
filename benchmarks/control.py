"""Suite ``control``: loops and branches that values decide, as PyTorch's operators have them, beside torch.compile's.

- ``eager``: PyTorch's own operators: the host waits for each decision
- ``compile``, ``compile reduce-overhead``: torch.compile of the same program
- ``without the condition``: our step whose update is never skipped

A case of training is one whole step.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from benchmarks import inference, training
from benchmarks.cases.learners import GuardedCase, LearnerCase, WorldModel
from benchmarks.cases.models import InferenceCase, TrainingCase, labelled, language, shape, tokens, transformer
from benchmarks.cases.sequences import Decoder, Mamba
from benchmarks.measuring import ours
from benchmarks.measuring.baselines import build_training
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import Side, build_each, compare
from benchmarks.measuring.suite import Settings, run_suite

PEERS = ("eager", "compile", "compile reduce-overhead")
TRAINING_PEERS = ("eager", "compile loop", "compile loop reduce-overhead")
WITHOUT = "without the condition"


class Cell(nn.Module):
    """A gated recurrent cell over all steps of a sequence, as one scan; a head on its last state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.gates = nn.Linear(width, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (batch, steps, width)."""

        def turn(state: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            here, before = part.chunk(3, 1), self.gates(state).chunk(3, 1)
            keep, reset = (here[0] + before[0]).sigmoid(), (here[1] + before[1]).sigmoid()
            state = keep * state + (1 - keep) * (here[2] + reset * before[2]).tanh()
            return state, state.mean(1)

        parts = self.inputs(x).transpose(0, 1).contiguous()
        last, means = scan(turn, parts.new_zeros(len(x), self.gates.in_features), parts)
        return self.head(last) + means.mean(0).unsqueeze(1)


class Refined(nn.Module):
    """A residual block that is applied until its counter says that it was enough."""

    def __init__(self, width: int, turns: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("turns", torch.tensor(turns))

    def forward(self, x: Tensor) -> Tensor:
        """The state after all turns."""

        def turn(number: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return number + 1, state + 0.1 * self.down(torch.relu(self.up(self.norm(state))))

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda number, state: number < self.turns, turn, (start, x))[1]


class Routed(nn.Module):
    """Layers of which each takes one of two ways, by the mean of what it is given."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.short = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """The result of all layers."""
        for number, (wide, short) in enumerate(zip(self.wide, self.short, strict=True)):
            far = x.float().square().mean() * (1 if number % 2 else -1)
            x = torch.cond(far > 0, lambda x, way=wide: x + torch.relu(way(x)), lambda x, way=short: way(x) * 1.5, (x,))
        return x


CASES = (
    InferenceCase(
        "gated cell 512 steps b16",
        lambda small: Cell(64, 64 if small else 256),
        shape(16, 512, 64, tiny=(2, 8, 64)),
        torch.float32,
        90,
    ),
    InferenceCase(
        "while 64 turns b16",
        lambda small: Refined(64 if small else 1024, 64),
        shape(16, 1024, tiny=(2, 64)),
        torch.float32,
        60,
    ),
    InferenceCase(
        "24 branches b64",
        lambda small: Routed(64 if small else 1024, 4 if small else 24),
        shape(64, 1024, tiny=(2, 64)),
        torch.float32,
        60,
    ),
    TrainingCase(
        "gated cell 128 steps b16 step",
        lambda small: Cell(64, 64 if small else 256),
        labelled(shape(16, 128, 64, tiny=(2, 8, 64)), 10),
        torch.optim.AdamW,
        {"lr": 1e-3},
        autocast=None,
        estimate_s=150,
    ),
    LearnerCase(
        "world model 64 steps b16 step",
        lambda small: WorldModel(8, 2, 16, 4, 3) if small else WorldModel(64, 6, 256, 32, 15),
        lambda small: tuple(
            torch.randn(*((6, 2) if small else (64, 16)), width) for width in ((8, 2) if small else (64, 6))
        ),
        torch.optim.Adam,
        {"lr": 1e-4},
        autocast=None,
        estimate_s=300,
    ),
    TrainingCase(
        "mamba block b8 1024 step",
        lambda small: Mamba(16, 32, 4) if small else Mamba(512, 1024, 16),
        labelled(shape(8, 1024, 512, tiny=(2, 12, 16)), 10),
        torch.optim.AdamW,
        {"lr": 1e-3},
        autocast=None,
        estimate_s=120,
    ),
    GuardedCase(
        "transformer skips updates step",
        transformer,
        language(1024, 16, 128, tiny=(2, 16)),
        torch.optim.AdamW,
        {"lr": 1e-4},
        clip=1.0,
        estimate_s=200,
    ),
    InferenceCase(
        "256 tokens in one loop b8",
        lambda small: Decoder(50, 32, 2, 2, 12) if small else Decoder(8192, 512, 8, 6, 272),
        tokens(50, 8, 16, tiny=(2, 4)),
        torch.float32,
        90,
    ),
)


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Build, judge and time all sides of a case."""
    if isinstance(case, GuardedCase):
        return run_guarded(case, settings)
    if isinstance(case, TrainingCase):
        return training.run_case(case, settings, TRAINING_PEERS)
    return inference.run_case(case, settings, PEERS)


def run_guarded(case: GuardedCase, settings: Settings) -> list[Row]:
    """The same, beside our step without the condition."""
    problem = case.make(settings.device, tiny=settings.tiny)
    judge = training.SampledTrainingJudge(problem)
    mine = ours.build_training(problem, judge)

    def build(name: str) -> Side:
        if name == WITHOUT:
            return replace(ours.build_training(case.without(settings.device, tiny=settings.tiny), judge), name=name)
        return build_training(problem, name, judge, plan_memory=settings.plan_memory)

    return compare(case.name, mine, build_each([*filter(settings.wants, (*TRAINING_PEERS, WITHOUT))], build), settings)


if __name__ == "__main__":
    sys.exit(run_suite("control", CASES, run_case))
