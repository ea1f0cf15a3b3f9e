"""``ms.precompile`` leaves everything as it was; the calls after it are what they would have been."""

import pytest
import torch
from torch import nn

import millstream as ms
import millstream.lower.compile as compiling
from tests.processes import bring_compiled_code


@pytest.fixture(autouse=True)
def _warm(tmp_path, monkeypatch):
    bring_compiled_code(tmp_path)
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")


class World:
    """A step with everything that a step changes: parameters, buffers, random numbers, a scheduler, output, a count."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.count = 0
        self.step = ms.step(self.train, strict=True)

    def train(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.count += 1
        print("stepped")  # noqa: T201  what a step does on the host
        return loss

    def state(self):
        weights = [each.clone() for each in self.model.state_dict().values()]
        moments = [part.clone() for entry in self.optimizer.state.values() for part in entry.values()]
        return [*weights, *moments, torch.get_rng_state(), torch.tensor([self.count, self.scheduler.last_epoch])]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_state_is_as_before_and_lowering_is_done(capsys, monkeypatch):
    x = torch.ones(4, 3)
    plain = World()
    expected = torch.stack([plain.train(x).detach() for _ in range(4)])
    world = World()
    before = world.state()
    capsys.readouterr()
    ms.precompile(world.step, x)
    assert same(world.state(), before)
    assert all(each.grad is None for each in world.model.parameters())
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(compiling, "compile_fx", None)  # it would raise
    losses = torch.stack([world.step(x).detach() for _ in range(4)])
    assert torch.allclose(losses, expected, rtol=1e-4)
    assert same(world.state()[-2:], plain.state()[-2:])


def test_with_optimizer_state_the_next_call_replays(capsys, monkeypatch):
    world = World(dropout=0.5)
    x = torch.ones(4, 3)
    world.step(x)
    before = world.state()
    ms.precompile(world.step, x)
    assert same(world.state(), before)
    (graph,) = world.step.graphs
    world.step(x)
    assert world.step.graphs == [graph]
    assert world.count == 2


def test_optimizer_that_never_has_state(monkeypatch):
    world = World()
    world.optimizer = torch.optim.SGD(world.model.parameters(), 0.1)
    world.scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2)
    before = world.state()
    ms.precompile(world.step, torch.ones(4, 3))
    assert same(world.state(), before)
    monkeypatch.setattr(compiling, "compile_fx", None)  # it would raise
    for _ in range(2):
        world.step(torch.ones(4, 3))
    assert world.step.graphs


def test_a_step_that_has_to_run_once_says_so():
    model = nn.LazyLinear(2)
    step = ms.step(lambda x: model(x).sum())
    with pytest.raises(ms.CaptureError, match="run once") as caught:
        ms.precompile(step, torch.ones(2, 2))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_what_is_no_step_is_refused():
    with pytest.raises(ms.ArgumentError, match=r"ms\.step"):
        ms.precompile(lambda x: x, 1)


def test_optimizer_that_needs_a_closure_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    step = ms.step(lambda x: optimizer.step(lambda: model(x).sum()))
    with pytest.raises(ms.CaptureError, match="LBFGS, which evaluates its closure"):
        ms.precompile(step, torch.ones(2, 2))
    assert not optimizer.state
