"""Shadow mode: what is recorded is guarded, what is written is found, and a step is captured as without."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from torch import nn

from millstream.capture import Step
from millstream.capture.guards import shadow
from millstream.capture.guards.guards import Guards
from millstream.capture.record import session
from millstream.capture.record.recorder import Recorder
from millstream.capture.record.scope import make_recorder
from millstream.capture.trace.modes import FunctionWatch
from tests.capture.guards.programs import frozen, programs, run
from tests.capture.guards.test_random_programs import FUZZ, SEED, SHARD
from tests.capture.worlds import interpret

pytestmark = pytest.mark.skipif(bool(session.why_not()), reason=session.why_not() or "it can be recorded")
SCALE = 0.5


class Config:
    smoothing = 0.1

    def __init__(self):
        self.table = {"a": [1.0, 2.0]}

    def __getattr__(self, name):
        if name == "weight":
            return self.table["a"][1]
        raise AttributeError(name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.ModuleList([nn.Linear(8, 8)]), 0.5

    def forward(self, x):
        for layer in self.inner:
            x = x + F.gelu(layer(x)) * self.scale
        return x


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), Block(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.config, self.names, self.count, self.seen = Config(), ["a", "b"], 0, {"rows": 0}

    def __call__(self, x, y):
        wanted = [name for name in self.names if name in self.config.table]
        loss = F.cross_entropy(self.model(x), y, label_smoothing=self.config.smoothing)
        loss = loss * SCALE * getattr(self.config, "wei" + "ght") * len(wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        self.seen["rows"] += len(x)
        return loss.detach()


def train(num_calls=4):
    torch.manual_seed(0)
    trainer = Trainer()
    step = Step(trainer, build=interpret, strict=True)
    losses = [step(torch.ones(2, 4) * n, torch.tensor([0, 2])) for n in range(num_calls)]
    return losses, step.graphs


@pytest.fixture
def shadowed(monkeypatch, caplog):
    monkeypatch.setenv("MILLSTREAM_RECORD", "shadow")
    caplog.set_level(logging.WARNING, "millstream.capture.guards.shadow")
    return lambda: [record.getMessage() for record in caplog.records if record.name == shadow.__name__]


def test_a_trainer_is_captured_as_without_it(shadowed, monkeypatch):
    losses, graphs = train()
    assert shadowed() == []
    monkeypatch.delenv("MILLSTREAM_RECORD")
    before, others = train()
    assert all(map(torch.equal, losses, before))
    assert [str(graph.gm.graph) for graph in graphs] == [str(graph.gm.graph) for graph in others]


def test_nothing_below_operators_and_symbolic_sizes_is_recorded(shadowed, monkeypatch):
    records = []
    monkeypatch.setattr(shadow, "report", lambda *of: records.append((of[0].dimensions, of[1].record)))
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).reshape(x.shape[0] * 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = Step(step, build=interpret, strict=True)
    for size in (2, 2, 3, 4):
        captured(torch.ones(size, 4))
    assert [bool(dimensions) for dimensions, _ in records] == [False, True]
    for _, record in records:
        files = {code.co_filename.partition("site-packages/")[2] for code in record.codes}
        assert {"torch/nn/modules/linear.py", "torch/optim/adam.py"} <= files
        assert [name for name in files if name.startswith(BELOW)] == []


BELOW = ("sympy", "torch/fx", "torch/_decomp", "torch/_meta", "torch/_prims", "torch/_refs", "torch/_subclasses")


def test_off_nothing_is_there(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "records")
    handler = FunctionWatch.__torch_function__

    def step(x):
        return x * (2 if FunctionWatch.__torch_function__ is handler else 3)

    assert Step(step, build=interpret, strict=True)(torch.ones(2)).tolist() == [2, 2]
    assert make_recorder(step, ()).failure == "it is switched off"


@pytest.mark.parametrize("key", ["SCALE", "names", "smoothing", "table"])
def test_a_guard_that_is_missing_is_named_with_its_line(shadowed, monkeypatch, key):
    expect, measure = Guards.expect, Guards.measure
    monkeypatch.setattr(Guards, "expect", lambda self, at, value: None if at.key == key else expect(self, at, value))
    monkeypatch.setattr(
        Guards, "measure", lambda self, name, held, **how: None if key in held else measure(self, name, held, **how)
    )
    train(2)
    assert any("read, but not guarded" in text and key in text and __file__ in text for text in shadowed())


def test_a_change_that_one_of_both_misses_is_named():
    box, state = type("Box", (), {})(), []
    box.v = 1

    def write():
        box.v = 2

    record = Recorder(lambda filename: filename == __file__, [write])
    with record.recording():
        write()
    assert [each.what for each in shadow.compare_writes(record, lambda: state)] == ["written, but not found"]
    box.v = 1
    assert shadow.compare_writes(record, lambda: state) == []


def test_what_cannot_be_recorded_is_named(shadowed, monkeypatch):
    monkeypatch.setattr(session, "why_not", lambda: "there is no compiler")
    train(2)
    assert shadowed() == ["MILLSTREAM_RECORD: not recorded: there is no compiler"]


@pytest.mark.parametrize("seed_of_shard", range(SEED, SEED + max(1, FUZZ // SHARD)))
def test_guards_see_all_that_random_programs_read(seed_of_shard, shadowed):
    @seed(seed_of_shard)
    @settings(
        max_examples=SHARD if FUZZ else 8,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(programs())
    def search(program):
        before = len(shadowed())
        run(replace(program, sizes=program.sizes[:3]))
        assert shadowed()[before:] == [], program.source

    with frozen():
        search()
