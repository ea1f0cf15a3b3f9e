"""Batches cross to the device beside computation, by hand. (``ms.feed`` does this by itself.)

python examples/streams_copy.py [BATCHES]
"""

import sys

import torch
from torch import Tensor

import millstream as ms

BATCHES = int(sys.argv[1]) if len(sys.argv) > 1 else 20
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

weight = torch.randn(512, 512, device=device) / 23
batches = [torch.randn(1024, 512) for _ in range(BATCHES)]
if device == "cuda":
    batches = [batch.pin_memory() for batch in batches]  # else a copy would wait for the host


def compute(x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.tanh(x @ weight)
    return x.mean()


results = []
with torch.no_grad(), ms.streams(2, device) as s:
    coming = s[1](batches[0].to, device, non_blocking=True)
    for batch in [*batches[1:], None]:
        here, coming = coming, None if batch is None else s[1](batch.to, device, non_blocking=True)
        results.append(compute(here))  # waits for the copy of its own batch, while the next one crosses

expected = [compute(batch.to(device)) for batch in batches]
print("the same numbers:", all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)))
