"""An LSTM whose four gates run on four streams, forward and backward, as brainstorm asked for.

python examples/streams_gates.py [STEPS]
"""

import sys
import time

import torch
from torch import Tensor, nn

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
WIDTH = 512
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Gates(nn.Module):
    """One layer of LSTM, each gate with weights of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.from_state = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, num_streams: int) -> Tensor:
        hidden = memory = torch.zeros_like(x[0])
        outputs = []
        with ms.streams(num_streams, x.device) as s:
            for now in x:
                gates = []
                for k in range(4):
                    with s[k]:
                        gates.append(self.from_input[k](now) + self.from_state[k](hidden))
                memory = torch.sigmoid(gates[0]) * memory + torch.sigmoid(gates[1]) * torch.tanh(gates[2])
                hidden = torch.sigmoid(gates[3]) * torch.tanh(memory)
                outputs.append(hidden)
        return torch.stack(outputs)


model = Gates(WIDTH).to(device)
x = torch.randn(STEPS, 8, WIDTH, device=device)


def run(num_streams: int) -> list[Tensor]:
    model.zero_grad()
    y = model(x, num_streams)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


one, four = run(1), run(4)
print("the same bits:", all(torch.equal(a, b) for a, b in zip(one, four, strict=True)))


def replay_ms(num_streams: int) -> float:
    """Milliseconds of the forward pass, captured in a CUDA graph."""
    with torch.no_grad():
        model(x, num_streams)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x, num_streams)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 20


if device == "cuda":
    print(f"one stream {replay_ms(1):.2f} ms, four {replay_ms(4):.2f} ms")
