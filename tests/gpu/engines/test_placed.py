"""Programs over two GPUs: the bits of one, by one graph and without, whatever happens in between."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.cost import KernelCost, Link, Rate, Roofline
from millstream.engine.cuda import placed_gpus as placed
from millstream.errors import ArgumentError, CaptureError
from tests import networks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact", "_spread"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices"),
]
DEVICES = ["cuda:0", "cuda:1"]


@pytest.fixture
def _spread(monkeypatch):
    """Copies cost nothing here and all kernels the same, so that tiny networks are spread."""
    monkeypatch.setattr(placed, "gpu_link", lambda *ends: Link("free", (Rate(0, 0, 1e18),)))
    monkeypatch.setattr(placed.PlacedOnGpus, "_find_costs", even_costs)


def even_costs(self, *_):
    graph = self.lowered.program.graph
    return replace(Roofline().estimate(graph), kernels=tuple(KernelCost(100_000) for _ in graph.kernels))


class Towers(nn.Module):
    """Images through towers, with convolutions, statistics, dropout and products; two share a weight."""

    def __init__(self, width=32):
        super().__init__()
        shared = nn.Conv2d(width, width, 3, padding=1)
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                shared,
                nn.Dropout(0.2),
                nn.Flatten(2),
            )
            for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))

    def forward(self, x):
        return torch.cat([head(tower(x)) for tower, head in zip(self.towers, self.heads, strict=True)], 1)


def used(compiled):
    return [(each.name, sorted(each.plan.graph.devices), each.notes) for each in executables(compiled)]


def train(device="cuda:0", **settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Towers().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @ms.step(strict=True, **settings)
    def step(x):
        results = model(x)
        loss = F.mse_loss(results, torch.ones_like(results))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, results

    results = []
    for number in range(10):
        with torch.cuda.stream(torch.cuda.Stream(device) if number == 8 else torch.cuda.current_stream(device)):
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
            results.append([each.clone() for each in step(torch.randn(4, 3, 8, 8, device=device))])
            torch.cuda.synchronize(device)
        if number == 5:  # an eager call on the same state, and a change of it
            with torch.no_grad():
                results.append(model.eval()(torch.randn(4, 3, 8, 8, device=device)))
                model.train()
                model.heads[0].weight.mul_(0.5)
        if number == 7:
            executables(step)[-1].release()
    results.append((copy.deepcopy(model.state_dict()), optimizer.state_dict()["state"]))
    return step, torch.utils._pytree.tree_leaves(results)


@pytest.mark.parametrize(("engine", "streams"), [("streams", 1), ("graph", 1), ("graph", 3)])
def test_steps_give_the_bits_of_one_device(engine, streams):
    _, expected = train(engine="serial")
    step, found = train(engine=engine, streams=streams, devices=DEVICES)
    assert all(map(torch.equal, found, expected))
    assert used(step)[-1] == (engine, DEVICES, [])


def test_models_under_autograd():
    def learn(**settings):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Towers().cuda(0)
        compiled = ms.compile(model, strict=True, **settings)
        for number in range(10):
            losses = [compiled(torch.randn(4, 3, 8, 8, device="cuda:0")).square().mean() for _ in range(1 + number % 2)]
            for loss in losses:
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return compiled, [*losses, *model.state_dict().values()]

    _, expected = learn(engine="serial")
    compiled, found = learn(engine="graph", devices=DEVICES)
    assert all(map(torch.equal, found, expected))
    assert [each[1:] for each in used(compiled)] == [(DEVICES, [])] * 2
    assert executables(compiled)[0].is_captured


def test_what_does_not_fit_on_one_device_runs_on_two():
    def train_deep(**settings):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))).cuda(0)

        @ms.step(strict=True, **settings)
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss

        results = [step(torch.randn(4096, 64, device="cuda:0")) for _ in range(6)]
        return [*results, *model.parameters()], executables(step)[-1]

    expected, alone = train_deep(engine="serial")
    found, executable = train_deep(devices=DEVICES, memory=alone.peak_bytes * 3 // 4)
    assert all(map(torch.equal, found, expected))
    assert (executable.name, sorted(executable.plan.graph.devices), executable.notes) == ("graph", DEVICES, [])
    assert executable.is_captured
    with pytest.raises(ArgumentError, match="too small"):
        train_deep(devices=DEVICES, memory=64)


def test_the_first_device_may_be_any():
    _, expected = train("cuda:1", engine="serial")
    step, found = train("cuda:1", engine="graph", devices=DEVICES[::-1])
    assert all(map(torch.equal, found, expected))
    assert used(step)[-1] == ("graph", DEVICES, [])
    assert {each.device.index for each in found if each.is_cuda} == {1}, "counts of steps are the host's"


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dtype", [torch.float, torch.half])
@torch.no_grad()
def test_inference(dtype, freeze):
    torch.manual_seed(0)
    model = Towers().eval().to("cuda:0", dtype, memory_format=torch.channels_last)
    alone = ms.compile(model, strict=True, engine="serial", freeze=freeze)
    torch._dynamo.reset()
    compiled = ms.compile(model, strict=True, engine="graph", freeze=freeze, devices=DEVICES)
    for number in range(10):
        x = torch.randn(4, 3, 8, 8, device="cuda:0", dtype=dtype)
        assert torch.equal(compiled(x), alone(x))
        if number == 4:
            model.heads[0].weight.mul_(0.5)
    assert used(compiled)[-1] == ("graph", DEVICES, [])
    thread = threading.Thread(target=lambda: results.append(torch.no_grad()(compiled)(x)))
    results = []
    thread.start()
    thread.join()
    assert torch.equal(*results, alone(x))
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:1") == torch.cuda.default_stream("cuda:1")
    executables(compiled)[-1].release()
    assert torch.equal(compiled(x), alone(x))


@torch.no_grad()
def test_it_becomes_a_part_of_a_graph_of_the_callers():
    model = Towers().eval().cuda(0)
    compiled = ms.compile(model, strict=True, engine="graph", devices=DEVICES)
    x = torch.randn(4, 3, 8, 8, device="cuda:0")
    for _ in range(5):
        expected = compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(x)
    graph.replay()
    networks.assert_close(result, expected)


def test_what_cannot_be_placed_is_said():
    with pytest.raises(ArgumentError, match="There is no cuda:9 here"):
        ms.compile(Towers(), devices=["cuda:0", "cuda:9"])
    model, x = Towers().cuda(1).eval(), torch.randn(4, 3, 8, 8, device="cuda:1")
    with torch.no_grad(), pytest.raises(CaptureError, match="kernels run on cuda:1, and devices= begins with cuda:0"):
        ms.compile(model, strict=True, devices=DEVICES)(x)
    with torch.no_grad(), pytest.raises(CaptureError, match="kernels run on cuda:1, and devices= begins with cuda:0"):
        ms.compile(model, strict=True, devices=DEVICES[:1])(x)
