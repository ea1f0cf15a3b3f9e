"""Alternatives to the usual kernels are tried in the whole program, in a later call, and kept where they are faster."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import compiling as building
from millstream.api import executables
from millstream.engine import CudaGraphEngine, ProgramPair, improving
from millstream.engine.planning.background import Background
from millstream.lower import lower_graph as lowering
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule.improve import KEPT, SLOWER


@pytest.fixture
def clock(monkeypatch):
    """Pretend times: of a program with the usual kernels, and of any other."""
    times = {"usual": 2_000_000, "other": 1_000_000, "ran": []}

    def pretended(engine, inputs, rewind):
        rewind()
        times["ran"].append([value.clone() for value in engine(list(inputs))])
        return lambda number: times["other" if id(engine) in others else "usual"]

    others = set()
    compare = improving._Trial._compare

    def knowing(self, own, best):
        others.clear()
        others.update({id(own)})
        return compare(self, own, best)

    monkeypatch.setattr(improving, "_timed", pretended)
    monkeypatch.setattr(improving._Trial, "_compare", knowing)
    return times


class Heads(nn.Module):
    """Products of one input, and one of a few rows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 24) for _ in range(3))
        self.out = nn.Linear(24, 8)

    def forward(self, x):
        return self.out(torch.tanh(self.q(x) * self.k(x)) + self.v(x))


def made(seed=0):
    torch.manual_seed(seed)
    return Heads(), torch.randn(4, 32), torch.randn(4, 8)


def tried_by(compiled):
    return [(each.alternative, each.outcome) for each in ms.explain(compiled).programs[0].alternatives]


def gradients(model, x, target):
    loss = (model(x) - target).square().mean()
    return [value.detach() for value in (loss, *torch.autograd.grad(loss, [*model.parameters()]))]


def rms(values, exact):
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(values, exact, strict=True)]


def test_errors_are_those_of_eager(clock):
    model, x, target = made()
    twin = Heads().double()
    twin.load_state_dict(model.state_dict())

    def step(x, target):
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, x, target)

    run = ms.step(step, tune="now", strict=True)
    errors = []
    for seed in range(5):
        _, x, target = made(seed)
        got, again = run(x, target), run(x, target)
        if seed >= 2:  # by now it is lowered otherwise
            exact = gradients(twin, x.double(), target.double())
            errors.append((rms(got, exact), rms(step(x, target), exact)))
            assert all(map(torch.equal, got, again))
    assert tried_by(run) == [("siblings", KEPT), ("few-rows", KEPT)]
    for place, value in enumerate(exact):
        own, eager = (sum(each[which][place] ** 2 for each in errors) ** 0.5 for which in (0, 1))
        assert own <= max(1.25 * eager, float(value.abs().max()) * torch.finfo(torch.bfloat16).eps)


def count_on(dropped=0.5, **settings):
    """Results of a model that writes and counts in its buffers, and draws; and those buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(dropped))
    run = ms.compile(model, **settings)
    with torch.no_grad():
        return run, [run(x) for x in torch.randn(5, 4, 32)], [*model.buffers()]


def test_trials_leave_no_trace_and_what_loses_is_given_up(clock):
    plain = count_on(options={"alternatives": False})
    clock["other"] = clock["usual"]  # a tie
    tied = count_on(tune="now")
    assert tried_by(tied[0]) == [("few-rows", SLOWER)]
    assert len(clock["ran"]) == 2
    assert all(map(torch.equal, [*plain[1], *plain[2]], [*tied[1], *tied[2]]))
    assert "not faster" in str(ms.explain(tied[0]))
    assert tried_by(plain[0]) == []


def test_no_clock_decides_where_results_are_to_be_reproducible(clock):
    model, x, _ = made()
    with torch.no_grad():
        run = ms.compile(model, tune="now", options={"reproducible": True})
        for _ in range(4):
            run(x)
        assert tried_by(run) == []
        torch.use_deterministic_algorithms(True)
        try:
            torch._dynamo.reset()
            run = ms.compile(model, tune="now")
            for _ in range(4):
                run(x)
            assert tried_by(run) == []
        finally:
            torch.use_deterministic_algorithms(False)
    assert not clock["ran"]


def test_a_choice_is_kept_on_disk(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    model, x, _ = made()
    results, lowered = [], []
    lower = lowering._lower_anew
    monkeypatch.setattr(lowering, "_lower_anew", lambda *args: lowered.append(args) or lower(*args))
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            run = ms.compile(model, tune="now")
            results.append([run(x) for _ in range(4)][-1])
            assert tried_by(run) == [("few-rows", KEPT)]
    assert len(lowered) == 2  # as usual, and otherwise
    assert torch.equal(*results)


def test_a_captured_program_goes_on_as_another(device, clock, monkeypatch):
    plain = count_on(0.0, options={"alternatives": False})  # a pretended capture would draw
    engines = []

    def build_captured(lowered, settings, **_):
        plan = plan_serial(lowered.program.graph)
        how = {"copy_outputs": True, "family": ProgramPair(), "scheduling": Scheduling(1), "warn": pytest.fail}
        engines.append(CudaGraphEngine(lowered, plan, **how))
        return engines[-1]

    monkeypatch.setattr(building, "build", build_captured)
    run, results, buffers = count_on(0.0, tune="now")
    assert tried_by(run) == [("few-rows", KEPT)]
    assert executables(run) == engines[2:]  # the usual one, the one that was tried, and what goes on
    assert [engine.is_captured for engine in engines] == [False, False, True]
    for own, usual in zip([*results, *buffers], [*plain[1], *plain[2]], strict=True):
        torch.testing.assert_close(own, usual)


@pytest.mark.parametrize("tune", ["first", "background"])
def test_trials_wait_for_their_share_of_the_time(clock, monkeypatch, tune):
    now = [0.0]
    monkeypatch.setattr(improving, "Background", lambda steps, **how: Background(steps, lambda: now[0], **how))
    model, x, _ = made()
    with torch.no_grad():
        run = ms.compile(model, tune=tune, streams=1)
        for _ in range(2 * improving.BETWEEN):
            run(x)
        assert not clock["ran"]
        now[0] = 1e6  # seconds
        for _ in range(4 * improving.BETWEEN):
            run(x)
    assert tried_by(run) == [("few-rows", KEPT)]


def test_a_step_on_disk_that_tried_nothing_is_tried_now(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    model, x, _ = made()

    def step(x):
        with torch.no_grad():
            return model(x)

    told = []
    for tune in ("first", "now", "first"):
        run = ms.step(step, tune=tune, strict=True)
        for _ in range(5):
            run(x)
        told.append(tried_by(run))
    assert told == [[], [("few-rows", KEPT)], [("few-rows", KEPT)]]
