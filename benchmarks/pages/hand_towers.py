"""Draws the pictures of docs/streams_by_hand.md: two towers on one stream, and as they are written. No GPU needed.

python -m benchmarks.pages.hand_towers
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import millstream as ms

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


class Towers(nn.Module):
    """Two towers, the second on stream 1."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))
            for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with ms.streams(2) as s:
            left = self.left(x)
            with s[1]:
                right = self.right(y)
            return left @ right.t()


@torch.no_grad()
def main() -> None:
    """Draw both."""
    argparse.ArgumentParser("python -m benchmarks.pages.hand_towers", description=__doc__).parse_args()
    torch.set_num_threads(max(torch.get_num_threads(), 2))
    inputs = torch.randn(256, 256), torch.randn(256, 256)
    for name, streams in (("one", 1), ("manual", "manual")):
        torch._dynamo.reset()
        compiled = ms.compile(Towers().eval(), streams=streams, engine="threads", strict=True)
        for _ in range(3):
            compiled(*inputs)
        explanation = ms.explain(compiled)
        picture = FIGURES / f"hand_towers_{name}.svg"
        explanation.save(picture)
        picture.write_text(picture.read_text().replace(f"{ROOT}/", ""))
        print(explanation)


if __name__ == "__main__":
    main()
