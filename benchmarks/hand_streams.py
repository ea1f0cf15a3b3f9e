"""Suite ``hand_streams``: what streams written down by hand gain, and what they cost the host.

- ``lstm gates``: brainstorm's LSTM, 2 × 512, 32 steps, batch 8, fp16, its four gates on four streams and on one, either
  captured in one ``torch.cuda.graph``; the forward pass alone, and with the backward pass.
- ``dual stream resnet50``: a whole training step in one CUDA graph (bf16 autocast, channels last, SGD with momentum),
  with ``ms.manual.dual_stream_backward`` and without.
- ``host``: microseconds that ``s[1].mm(a, b)`` takes over ``torch.mm(a, b)``, that a fork and join take, and so on.
- ``saved tensors``: two ways to keep what autograd saves on another stream: telling the allocator, or hooks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import millstream as ms
from benchmarks.cases.networks import GateCell
from benchmarks.measuring.harness import Sample, alternate, device_clock, settled_memory
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.suite import Settings, run_suite


@dataclass(frozen=True)
class HandCase:
    """Something that is measured."""

    name: str
    run: Callable[[Settings], list[Row]]
    estimate_s: float


# --- brainstorm's LSTM -----------------------------------------------------------------------------------------------


class HandLSTM(nn.Module):
    """Two layers of LSTM, step by step; the gates of a cell on streams."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(GateCell(width, width) for _ in range(layers))

    def forward(self, x: Tensor, num_streams: int) -> Tensor:
        """From (steps, batch, width) to the same."""
        states = [(torch.zeros_like(x[0]),) * 2 for _ in self.cells]
        outputs = []
        with ms.streams(num_streams, x.device) as s:
            for below in x:
                for layer, cell in enumerate(self.cells):
                    hidden, memory = states[layer]
                    gates = []
                    for number, squash in enumerate((torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid)):
                        with s[number]:
                            gates.append(squash(cell.from_input[number](below) + cell.from_state[number](hidden)))
                    memory = gates[1] * memory + gates[0] * gates[2]
                    below = gates[3] * torch.tanh(memory)
                    states[layer] = below, memory
                outputs.append(below)
        return torch.stack(outputs)


def capture(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Warm a function up and capture it by hand in one CUDA graph; return the replay and the results."""
    if device.type != "cuda":
        return run, run()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_lstm(settings: Settings) -> list[Row]:
    """One stream against four."""
    device = settings.device
    torch.manual_seed(0)
    steps, batch, width = (4, 2, 16) if settings.tiny else (32, 8, 512)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model = HandLSTM(width).to(device, dtype)
    x = torch.randn(steps, batch, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(steps, batch, width, device=device, dtype=dtype)

    def infer(num_streams: int) -> list[Tensor]:
        with torch.no_grad():
            return [model(x, num_streams)]

    def train(num_streams: int) -> list[Tensor]:
        # Nothing of the graph of gradients is returned: in a capture, no node may be left from before.
        leaves = [x, *model.parameters()]
        out = model(x, num_streams)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    rows = []
    for variant, run in (("forward", infer), ("forward and backward", train)):
        eager = run(1)
        before = settled_memory(device) if device.type == "cuda" else 0
        sides, clocks, peaks = {}, {}, {}
        for number in (1, 4):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            replay, sides[number] = capture(partial(run, number), device)
            if device.type == "cuda":
                peaks[number] = torch.cuda.max_memory_allocated(device) - before
            clocks[str(number)] = device_clock(replay, device)
        samples = alternate(clocks, settings.rounds)
        own, base = samples["4"], samples["1"]
        equal = same(sides[1], eager) and same(sides[4], eager)
        rows.append(
            Row(
                "lstm gates",
                variant,
                "one stream",
                base.median,
                own.median,
                ratio(base.median, own.median),
                own.p20,
                own.p80,
                streams=4,
                peak_bytes=peaks.get(4),
                peak_ratio=ratio(peaks.get(4), peaks.get(1)),
                equal=equal,
            )
        )
    return rows


# --- ResNet-50 -------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """He et al., "Deep residual learning" (2015), with the stride in the 3 × 3 convolution."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(fan_in, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, 4 * width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or fan_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if number < 2 else y
        return F.relu(y + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Sequential:
    """ResNet-50 by default."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    fan_in = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(fan_in, width << stage, 2 if block == 0 and stage else 1))
            fan_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, classes))


class Training:
    """A training step of its own model, to be captured."""

    def __init__(self, batch: int, settings: Settings, *, dual: bool) -> None:
        torch.manual_seed(0)
        device, size = settings.device, 32 if settings.tiny else 224
        self.model = resnet((1, 1), 8, 10) if settings.tiny else resnet()
        self.model = self.model.to(device, memory_format=torch.channels_last)
        ms.manual.dual_stream_backward(self.model, enabled=dual)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        self.y = torch.randint(10, (batch,), device=device)
        self.kind = device.type

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.kind, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def run_resnet(batch: int, settings: Settings) -> list[Row]:
    """The step with gradients side by side against the step without."""
    device = settings.device
    sides = {}
    for name in ("without", "dual"):
        training = Training(batch, settings, dual=name == "dual")
        replay, loss = capture(training, device)
        peak = measure_peak(training, device)
        sides[name] = training, replay, loss, peak
    clocks = {name: device_clock(side[1], device) for name, side in sides.items()}
    samples = alternate(clocks, settings.rounds)
    # As many steps on both sides so far; the same numbers only where the same algorithms were found.
    weights = {name: [*side[0].model.parameters()] for name, side in sides.items()}
    equal = same(weights["dual"], weights["without"])
    own, base = samples["dual"], samples["without"]
    return [
        Row(
            f"dual stream resnet50 b{batch}",
            "whole step in one graph",
            "without",
            base.median,
            own.median,
            ratio(base.median, own.median),
            own.p20,
            own.p80,
            streams=2,
            peak_bytes=sides["dual"][3],
            peak_ratio=ratio(sides["dual"][3], sides["without"][3]),
            equal=equal,
        )
    ]


def measure_peak(training: Training, device: torch.device) -> int | None:
    """Peak memory of one capture of a step, model and optimizer included."""
    if device.type != "cuda":
        return None
    training.optimizer.zero_grad(set_to_none=True)
    others = settled_memory(device)
    own = sum(p.nbytes for p in training.model.parameters()) * 2
    torch.cuda.reset_peak_memory_stats(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training()
    peak = torch.cuda.max_memory_allocated(device) - others + own
    del graph
    training.optimizer.zero_grad(set_to_none=True)
    settled_memory(device)
    return peak


# --- the host --------------------------------------------------------------------------------------------------------

CALLS = 200  # of small kernels: a launch queue holds a thousand


def per_call_us(run: Callable[[], Any], device: torch.device, calls: int = CALLS) -> float:
    """Microseconds of the host for one call, in a loop that finds the device idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    run()
    spent = (time.perf_counter_ns() - start) / 1e3 / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return spent


@torch.no_grad()
def run_host(settings: Settings) -> list[Row]:  # noqa: C901 - a list of small functions
    """What each form of a call takes."""
    device = settings.device
    a, b = (torch.randn(16, 16, device=device) / 4 for _ in range(2))
    grad_a = a.clone().requires_grad_()

    def plain() -> None:
        for _ in range(CALLS):
            torch.mm(a, b)

    def same_stream() -> None:
        with ms.streams(4, device) as s:
            c = s[1].mm(a, b)
            for _ in range(CALLS):
                s[1].mm(c, c)

    def crossing() -> None:
        with ms.streams(4, device) as s:
            c = a
            for number in range(CALLS):
                c = s[1 + number % 2].mm(c, b)

    def bare() -> None:
        with ms.streams(4, device):
            for _ in range(CALLS):
                torch.mm(a, b)

    def chain() -> None:
        c = a
        for _ in range(CALLS):
            c = torch.mm(c, b)

    def fork() -> None:
        for _ in range(CALLS):
            with ms.streams(4, device) as s:
                s[1].mm(a, b), s[2].mm(a, b), s[3].mm(a, b)

    def no_fork() -> None:
        for _ in range(CALLS):
            torch.mm(a, b), torch.mm(a, b), torch.mm(a, b)

    def fork_only() -> None:
        for _ in range(CALLS):
            with ms.streams(4, device):
                pass

    def single() -> None:
        for _ in range(CALLS):
            with ms.streams(1):
                pass

    def aux() -> None:
        for _ in range(CALLS):
            with ms.manual.aux_streams(2, device):
                pass

    @torch.enable_grad()
    def grad_plain() -> None:
        for _ in range(CALLS):
            torch.mm(grad_a, b)

    @torch.enable_grad()
    def grad_same() -> None:
        with ms.streams(4, device) as s:
            for _ in range(CALLS):
                s[1].mm(grad_a, b)

    def nothing() -> None:
        for _ in range(CALLS):
            pass

    pairs = {
        "s[1].mm, no crossing": (same_stream, plain),
        "s[1].mm, with gradients": (grad_same, grad_plain),
        "s[i].mm, a crossing each": (crossing, chain),
        "bare mm in a scope": (bare, plain),
        "fork and join of four, each used": (fork, no_fork),
        "fork and join of four, none used": (fork_only, nothing),
        "aux_streams(2)": (aux, nothing),
        "streams(1)": (single, nothing),
    }
    rows = []
    for name, (ours, theirs) in pairs.items():
        for run in (ours, theirs) * 3:
            run()
        clocks = {"ours": partial(per_call_us, ours, device), "theirs": partial(per_call_us, theirs, device)}
        samples = alternate(clocks, settings.rounds)
        spent = Sample.of([o - t for o, t in zip(samples["ours"].times, samples["theirs"].times, strict=True)])
        note = f"{spent.median:.2f} us over {samples['theirs'].median:.2f} us"
        ours_ms, p20, p80 = (us / 1e3 for us in (spent.median, spent.p20, spent.p80))
        rows.append(Row(f"host: {name}", ours_ms=ours_ms, p20=p20, p80=p80, note=note))
    return rows


def run_saved(settings: Settings) -> list[Row]:
    """Microseconds for each tensor that autograd saves: hooks that pack and unpack, against telling the allocator."""
    device = settings.device
    a = torch.randn(16, 16, device=device, requires_grad=True)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def chain() -> Tensor:
        c = a
        for _ in range(CALLS):
            c = torch.sin(c)
        return c

    def plain() -> None:
        chain().sum().backward()

    def hooks() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, side), lambda pair: pair[0]):
            out = chain()
        out.sum().backward()

    def record() -> None:
        c = a
        for _ in range(CALLS):
            c = torch.sin(c)
            if side is not None:
                c.record_stream(side)
        c.sum().backward()

    for run in (plain, hooks, record) * 3:
        run()
    clocks = {name: partial(per_call_us, run, device) for name, run in (("p", plain), ("h", hooks), ("r", record))}
    samples = alternate(clocks, settings.rounds)
    with_hooks, marked = (samples[name].median - samples["p"].median for name in "hr")
    note = f"a saved tensor: {marked:.2f} us by record_stream, {with_hooks:.2f} us by hooks"
    return [
        Row(
            "saved tensors",
            "record_stream",
            "hooks",
            with_hooks / 1e3,
            marked / 1e3,
            ratio(with_hooks, marked),
            note=note,
        )
    ]


def run_case(case: HandCase, settings: Settings) -> list[Row]:
    return case.run(settings)


CASES = (
    HandCase("host", run_host, 20),
    HandCase("lstm gates", run_lstm, 30),
    HandCase("dual stream resnet50 b8", partial(run_resnet, 8), 40),
    HandCase("dual stream resnet50 b32", partial(run_resnet, 32), 40),
    HandCase("saved tensors", run_saved, 10),
)

if __name__ == "__main__":
    sys.exit(run_suite("hand_streams", CASES, run_case))
