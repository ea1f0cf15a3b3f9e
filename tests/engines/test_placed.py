"""Programs on virtual devices of a CPU: the bits of one device, whatever happens in between, and the fastest kept."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import millstream as ms
from millstream._torch.distributed.fake_group import among_fake_processes
from millstream.api import executables
from millstream.cost import KernelCost, Link, Rate, Roofline
from millstream.engine import OneOfMany, build
from millstream.engine.arena import Arena
from millstream.engine.cpu import placed_cpu as placed
from millstream.engine.cpu.worker_pool import worker_pool
from millstream.errors import ArgumentError, FallbackWarning
from millstream.graph import CHOSEN, Role
from millstream.placement import search
from millstream.schedule import assign_offsets
from millstream.schedule.choose import Rules
from millstream.settings import Settings
from tests import networks

pytestmark = pytest.mark.usefixtures("lowered_once")
DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True)
def _free_links(monkeypatch):
    """Copies cost nothing here, so that tiny networks are spread."""
    torch._dynamo.reset()
    monkeypatch.setattr(placed, "cpu_link", lambda: Link("free", (Rate(0, 0, 1e18),)))
    monkeypatch.setattr(search, "MOST_KERNELS", 1_000)
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # written and compiled in half the time
        yield


class Towers(nn.Module):
    """Embedded tokens through towers of several kinds, with dropout, statistics and a weight that two of them share."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        shared = nn.Linear(32, 32)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), norm, nn.Dropout(0.3), shared, nn.Tanh(), nn.Linear(32, 8))
            for norm in (nn.BatchNorm1d(32), nn.LayerNorm(32))
        )
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        x = self.embedding(tokens).flatten(1)
        return self.head(torch.cat([tower(x) for tower in self.towers], 1))


def batch(rows=6):
    return torch.randint(0, 16, (rows, 4)), torch.randint(0, 4, (rows,))


def make_step(**settings):
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @ms.step(strict=True, **settings)
    def step(tokens, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits

    return step, model, optimizer


def devices_of(compiled):
    return [sorted(executable.plan.graph.devices) for executable in executables(compiled)]


def train(**settings):
    """Steps with what users do between them; every result, and the state in the end."""
    step, model, optimizer = make_step(**settings)
    torch.manual_seed(1)
    results = []
    for number in range(9):
        with worker_pool().busy if number == 7 else contextlib.nullcontext():  # that call finds them busy
            results.append(step(*batch()))
        if number == 4:  # eager calls on the same state, and a change of it
            loss = F.cross_entropy(model(batch()[0]), batch()[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(copy.deepcopy(model.state_dict()))
            with torch.no_grad():
                model.head.weight.mul_(0.5)
        if number == 6:  # a call that fails in one of its kernels leaves the state as it was
            before = copy.deepcopy(model.state_dict())
            with pytest.raises((IndexError, RuntimeError)):
                step(torch.full((6, 4), 99), batch()[1])
            networks.assert_close([*model.state_dict().values()], [*before.values()], 0)
            torch.manual_seed(2)
    results.append((model.state_dict(), optimizer.state_dict()["state"]))
    return step, torch.utils._pytree.tree_leaves(results)


def even_costs(self, *_):
    """And not what the machine's load has made of them."""
    graph = self.lowered.program.graph
    return replace(Roofline().estimate(graph), kernels=tuple(KernelCost(100_000) for _ in graph.kernels))


def is_the_same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("engine", "devices"), [("serial", DEVICES), ("threads", DEVICES), ("threads", ["cpu:0", "cpu:1", "cpu:2"])]
)
def test_steps_give_the_bits_of_one_device(engine, devices, monkeypatch):
    monkeypatch.setattr(placed.PlacedOnCpu, "_find_costs", even_costs)
    _, expected = train(engine=engine)
    step, found = train(engine=engine, devices=devices)
    assert is_the_same(found, expected)
    (used,) = devices_of(step)
    assert used == devices
    (executable,) = executables(step)
    graph = executable.plan.graph
    assert {b.device for b in graph.buffers if b.role is Role.STATE} == {"cpu:0"}
    assert executable.num_streams == (1 if engine == "serial" else executable.num_streams)


class Branches(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())]) for _ in range(2)
        )

    def forward(self, x):
        return [branch(x) for branch in self.branches]


def test_models_give_the_bits_of_one_device_under_autograd():
    found = []
    for settings in ({}, {"devices": DEVICES}):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Branches()
        compiled = ms.compile(model, engine="serial", strict=True, **settings)
        for _ in range(3):
            results = compiled(torch.randn(8, 64))
            sum(each.square().sum() for each in results).backward()
        found.append([*results, *(parameter.grad for parameter in model.parameters())])
    assert is_the_same(*found)
    assert DEVICES in devices_of(compiled)


@pytest.mark.parametrize(("times", "kept"), [((10, 20), DEVICES), ((20, 10), ["cpu"]), ("rounds otherwise", ["cpu"])])
@torch.no_grad()
def test_what_was_measured_faster_is_kept(monkeypatch, times, kept):
    monkeypatch.setattr(placed, "ON_CPU", Rules(slack=0, promise=-9, margin=0.03))
    monkeypatch.setattr(placed.CpuTrial, "compare", lambda *_: times)
    model = Branches()
    compiled = ms.compile(model, devices=DEVICES, strict=True)
    x = torch.randn(8, 64)
    for _ in range(4):
        results = compiled(x)
    networks.assert_close(results, model(x))
    assert devices_of(compiled) == [kept]
    (executable,) = executables(compiled)
    assert len([each for each in executable.candidates if each.outcome == CHOSEN]) == 1


def test_what_does_not_fit_on_one_device_runs_on_two():
    def train_branches(**settings):
        torch.manual_seed(0)
        model = Branches(5)

        @ms.step(strict=True, **settings)
        def step(x):
            left, right = model(x)
            loss = (left * right).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss

        results = [step(torch.randn(512, 64)) for _ in range(3)]
        with worker_pool().busy:
            results.append(step(torch.randn(512, 64)))
        return results, executables(step)[-1]

    expected, alone = train_branches(engine="serial")
    bound = alone.peak_bytes * 3 // 4
    found, executable = train_branches(engine="threads", devices=DEVICES, memory=bound)
    assert is_the_same(found, expected)
    assert sorted(executable.plan.graph.devices) == DEVICES
    assert all(assign_offsets(executable.plan, device).arena_bytes <= bound for device in DEVICES)
    found, _ = train_branches(engine="threads", devices=DEVICES, memory=alone.peak_bytes)
    assert is_the_same(found, expected), "one device is enough, whatever is found for two"
    with pytest.raises(ArgumentError, match="too small"):
        train_branches(devices=DEVICES, memory=64)


@torch.no_grad()
def test_another_size_takes_the_plan_of_one_device(monkeypatch):
    monkeypatch.setattr(placed.PlacedOnCpu, "_find_costs", even_costs)
    compiled = ms.compile(Branches(), engine="threads", devices=DEVICES, strict=True)
    for _ in range(4):
        compiled(torch.randn(8, 64))
    (placed_one,) = executables(compiled)
    assert placed_one.num_streams > 1
    assert sorted(placed_one.plan.graph.devices) == DEVICES
    settings, many = Settings.of(devices=DEVICES), OneOfMany(Arena(), placed_one)
    again = build(placed_one.lowered, settings, one_of_many=many)  # which checks its plan
    assert again.one.plan.graph is placed_one.lowered.program.graph


@torch.no_grad()
def test_explanation_has_a_row_for_each_device_and_what_crosses():
    compiled = ms.compile(Branches(), engine="serial", devices=DEVICES, strict=True)
    compiled(torch.randn(8, 64))
    explained = ms.explain(compiled, measure=True)
    text = str(explained)
    assert "temporaries and outputs\n  cpu:0" in text
    assert "crosses cpu:0 → cpu:1: " in text
    assert "not measured: its kernels run on cpu:0, cpu:1" in text
    (program,) = explained.to_dict()["programs"]
    assert [each["device"] for each in program["placement"]["devices"]] == DEVICES
    assert all(each["num_bytes"] and each["copies"] for each in program["placement"]["crossings"])


def test_what_is_not_built_is_refused():
    for settings, text in (
        ({"devices": ["cuda:0", "cuda:99"]}, "There is no cuda:"),
        ({"devices": ["cuda:0", "cuda:1"], "engine": "serial"}, "knows one CUDA device"),
        ({"devices": ["cuda:0", "cpu:1"]}, "compiled for one kind"),
        ({"devices": ["cuda:0", torch.device("cuda:0")]}, "has cuda:0 twice; give each device once"),
        ({"devices": ["cpu:1", "cpu:01"]}, "has cpu:1 twice"),
        ({"devices": ["cpu:0", "gpu"]}, "'gpu' is no device to put kernels on; name them as in"),
        ({"devices": ["meta"]}, "'meta' is no device to put kernels on"),
        ({"devices": [torch.device("cuda"), "cuda:1"]}, "'cuda' is several; say which"),
        ({"devices": [True]}, "True is no device"),
        ({"devices": [99]}, "There is no cuda:99 here"),
        ({"devices": "cpu:0"}, "devices='cpu:0' is no list of devices; give one, as in"),
        ({"devices": torch.device("cpu:0")}, "is no list of devices"),
        ({"devices": {"cpu:0", "cpu:1"}}, "has no order, and the first is where your tensors are"),
        ({"devices": 1.5}, "is no list of devices"),
        ({"devices": DEVICES, "engine": "graph"}, "is for CUDA devices"),
        ({"devices": DEVICES, "streams": "manual"}, "is for one device"),
    ):
        with pytest.raises(ArgumentError, match=text):
            ms.compile(Branches(), **settings)
    with pytest.raises(ArgumentError, match="a process for each device"):
        ms.step(lambda x: x, devices=DEVICES, data_parallel=True)


@pytest.mark.parametrize(
    ("devices", "kept"),
    [
        ((f"cpu:{number}" for number in range(2)), DEVICES),
        ([torch.device("cpu:1"), torch.device("cpu:0")], DEVICES),
        (["cpu:3"], ["cpu"]),
        ([], ["cpu"]),
    ],
)
@torch.no_grad()
def test_devices_are_any_list(devices, kept):
    model, x = Branches(), torch.randn(8, 64)
    compiled = ms.compile(model, engine="serial", devices=devices, strict=True)
    networks.assert_close(compiled(x), model(x))
    assert devices_of(compiled) == [kept]


def test_step_that_exchanges_gradients_runs_as_plain_python():
    with among_fake_processes(2):
        dist.init_process_group("gloo")
        model = DistributedDataParallel(nn.Linear(4, 2))

        @ms.step(devices=DEVICES)
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss

        with pytest.warns(FallbackWarning, match="devices= are of one process"):
            losses = [step(torch.ones(2, 4)) for _ in range(3)]
        dist.destroy_process_group()
    assert losses[2] < losses[0]
