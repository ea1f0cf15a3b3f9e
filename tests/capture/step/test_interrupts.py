"""Signals whose handlers raise, at any moment of a step: it is done, or has done nothing."""

import random
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from tests.networks import assert_close


class StopTrainingError(Exception):
    pass


def stop(number, frame):
    raise StopTrainingError


@pytest.fixture
def handle():
    before = {}

    def set_handler(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield set_handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


class Training:
    """Some training that counts its steps in Python, too."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01, eps=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, 0.9)
        self.num_steps = 0

    def step(self, x):
        loss = F.mse_loss(self.model(x), x[:, :2])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.num_steps += 1
        return loss

    def state(self):
        counts = [entry["step"] for entry in self.optimizer.state.values()]
        return [*self.model.state_dict().values(), *counts, torch.tensor(self.scheduler.last_epoch)]


@pytest.mark.usefixtures("lowered_once")
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_step_that_a_signal_meets_is_whole(engine, handle):
    ours, eager = Training(), Training()
    step = ms.step(ours.step, engine=engine, strict=True)
    x = torch.arange(24.0).reshape(6, 4) % 5
    for _ in range(4):
        step(x)
    handle(signal.SIGALRM, stop)
    moments = random.Random(0)
    for _ in range(30):
        with pytest.raises(StopTrainingError):  # noqa: PT012  it comes from any of the calls
            while True:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 1e-3))
                for _ in range(1000):  # within a finalizer, Python prints what a handler raises, and goes on
                    step(x)
        while eager.num_steps < ours.num_steps:
            eager.step(x)
        assert_close(ours.state(), eager.state())
        assert torch.is_grad_enabled()
    assert not step.fallbacks


@pytest.mark.parametrize("presses", [1, 2])
def test_a_second_interrupt_does_not_wait_for_the_step(presses, handle):
    handle(signal.SIGINT, signal.default_int_handler)
    weight, passed = torch.ones(2), []

    def press():
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        passed.append(True)

    @ms.step(strict=True)
    def step(x):
        weight.add_(x)
        ms.callback(press)

    for number in range(1, 4):
        with pytest.raises(KeyboardInterrupt):
            step(torch.ones(2))
        assert weight.tolist() == [number + 1.0] * 2
    assert len(passed) == (2 if presses == 1 else 0)  # the first call is eager


@pytest.mark.parametrize("is_changed", [False, True])
def test_handlers_around_steps_are_called_and_may_be_put_back(is_changed, handle):
    seen = []
    step = ms.step(lambda x: x + 1)
    handle(signal.SIGTERM, lambda number, frame: seen.append("first"))
    for _ in range(3):
        step(torch.ones(2))
    before = signal.getsignal(signal.SIGTERM)
    if is_changed:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append("second"))
        step(torch.ones(2))
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["second" if is_changed else "first", "first"]


def test_handlers_are_their_owners_after_a_call(handle):
    handle(signal.SIGINT, signal.default_int_handler)
    step = ms.step(Training().step)
    for _ in range(3):
        step(torch.ones(6, 4))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # asyncio asks for it, say
