"""``tune="background"``: a plan is chosen between calls, in so much of the time, and nothing else changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.api import executables
from millstream.cost import Roofline
from millstream.engine.cuda import cuda_graph
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.planning.background import SHARE, Background
from millstream.errors import ArgumentError
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule.choose import propose
from tests.engines.become import become


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(st.lists(st.floats(0.001, 5.0), max_size=8), st.floats(0.001, 20.0))
def test_pieces_take_their_share_of_the_time(pieces, between):
    clock, spent = Clock(), []

    def work():
        for seconds in pieces:
            yield
            clock.now += seconds
            spent.append(seconds)
        return "plan"

    background = Background(work(), clock)
    start = clock.now
    while not background.is_over:
        clock.now += between
        if background.is_due:
            before = sum(spent)
            assert before <= SHARE * (clock.now - start)
            background.advance()
    assert background.result == "plan"
    assert spent == pieces
    assert not background.is_due


def test_work_that_fails_is_over():
    def work():
        yield
        raise ValueError("no memory")

    clock = Clock()
    background = Background(work(), clock)
    background.advance()
    with pytest.raises(ValueError, match="no memory"):
        background.advance()
    assert background.is_over
    assert background.result is None


def test_unknown_time_to_tune_is_refused():
    with pytest.raises(ArgumentError, match="tune='later'"):
        ms.compile(torch.nn.Linear(2, 2), tune="later")
    with pytest.raises(ArgumentError, match="tune='later'"):
        ms.step(lambda x: x, tune="later")


class Planner:
    """Takes three pieces of a tenth of a second, writes to what the step writes, and finds two streams."""

    def __init__(self, lowered, serial, context, scheduling):
        self.costs, self.candidates, self.error, self.num_measured = None, (), None, 0
        self._program = lowered.program

    def measuring_run(self, inputs):
        self.num_measured += 1
        cuda_graph.time.now += 0.1
        for name, tensor in zip(self._program.inputs, inputs, strict=True):
            if name in self._program.mutated:
                tensor.detach().mul_(2)

    def settle_stepwise(self, trials):
        for _ in range(2):
            yield
            cuda_graph.time.now += 0.1
        graph = self._program.graph
        return propose(graph, Roofline().estimate(graph), Scheduling(2, "chains"))[-1]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.monotonic = clock
    monkeypatch.setattr(cuda_graph, "time", clock)
    monkeypatch.setattr(cuda_graph, "Planner", Planner)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,) * 2)
    return clock


def make_step(**settings):
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    @ms.step(strict=True, **settings)
    def step(x):
        loss = sum(layer(x).tanh().square().mean() for layer in model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_plan_changes_between_calls_and_nothing_else(device, clock):
    x = torch.randn(3, 8)
    plain, tuned = make_step(), make_step()
    for _ in range(2):
        plain(x), tuned(x)
    (executable,) = executables(tuned)
    lowered = executable.lowered
    on_graphs = cuda_graph.CudaGraphEngine(
        lowered,
        plan_serial(lowered.program.graph),
        copy_outputs=True,
        family=ProgramPair(),
        scheduling=Scheduling(tune="background"),
        warn=pytest.fail,
    )
    engine = become(executable, on_graphs)
    streams, started = [], clock.now
    for _ in range(40):
        assert torch.equal(tuned(x), plain(x))
        streams.append(engine.plan.num_streams)
        assert clock.now - started <= len(streams) * (1 + 2 * SHARE) + 0.1
        clock.now += 1
    assert engine._planner.num_measured == 1
    assert streams[:10] == [1] * 10
    assert streams[-1] > 1
    assert engine.is_captured
    assert engine.is_settled


def test_a_choice_on_disk_serves_both():
    assert repr(Scheduling(tune="background")) == repr(Scheduling())
