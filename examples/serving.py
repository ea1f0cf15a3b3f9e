"""Serving: one compiled model, asked from several threads, with one graph per size of batch.

python examples/serving.py [REQUESTS]
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import millstream as ms

REQUESTS = int(sys.argv[1]) if len(sys.argv) > 1 else 400
SIZES = (1, 4, 16)  # requests are padded to the next: each size is compiled once
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
network = network.to(device).eval()
# Parameters become constants, as serving does not change them; each of the few sizes gets kernels of its own.
model = ms.compile(network, freeze=True, dynamic=False)


@torch.inference_mode()
def answer(x: Tensor) -> Tensor:
    size = next(size for size in SIZES if size >= len(x))
    padded = nn.functional.pad(x.to(device), (0, 0, 0, size - len(x)))
    return model(padded)[: len(x)].cpu()


for size in SIZES:  # compile and capture before the first request comes, not during it
    for _ in range(2):
        answer(torch.zeros(size, 64))

wrong, lock = 0, threading.Lock()


def request(seed: int) -> None:
    global wrong
    x = torch.randn(1 + seed % 16, 64, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        expected = network(x.to(device)).cpu()
    if not torch.allclose(answer(x), expected, atol=1e-4):
        with lock:
            wrong += 1


with ThreadPoolExecutor(4) as threads:
    list(threads.map(request, range(REQUESTS)))
print(f"{REQUESTS} requests from 4 threads, {wrong} wrong answers")
assert wrong == 0
