"""Training that begins while another process compiles, with interruptions at random: as eager, and nothing is lost.

Programs are on disk from the start, and are found from a call on that is drawn, as if another process had written them.
``MILLSTREAM_FUZZ=50`` runs so many trainings.
"""

import copy
import os
import random
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.capture.kept import elsewhere
from millstream.lower.kept.program_files import ProgramFile
from tests.processes import bring_compiled_code

RUNS, CALLS = int(os.environ.get("MILLSTREAM_FUZZ", "8")), 100


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    bring_compiled_code(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WARM_START", "1"), ("TRACES", ""), ("TUNE", ""), ("CACHE_DIR", str(folder))):
            patch.setenv(f"MILLSTREAM_{name}", value)
        yield


class Told:
    """Stands for the other process, which ends when the run says so."""

    since = 0.0
    is_there = False

    def __init__(self, path):
        path.unlink()

    @property
    def is_over(self):
        return self.is_there

    def stop(self):
        pass


class Trainer:
    """A model that is trained by the step, and its twin by eager PyTorch."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.twin = copy.deepcopy(self.model)
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (self.model, self.twin)]
        self.fails = False
        self.step = ms.step(self.make(self.model, self.optimizers[0]), tune="background", dynamic=False)
        self.eager = self.make(self.twin, self.optimizers[1])

    def make(self, model, optimizer):
        def train_step(x, y):
            if self.fails:
                raise LookupError("the user's own")
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train_step

    def state(self, number):
        model = (self.model, self.twin)[number]
        return copy.deepcopy((model.state_dict(), self.optimizers[number].state_dict()))

    def load(self, number, state):
        model, optimizer = (self.model, self.twin)[number], self.optimizers[number]
        model.load_state_dict(copy.deepcopy(state[0]))
        optimizer.load_state_dict(copy.deepcopy(state[1]))

    def is_as_eager(self):
        (model, optimizer), (twin, eager) = self.state(0), self.state(1)
        torch.testing.assert_close(model, twin)
        torch.testing.assert_close(optimizer["state"], eager["state"], check_device=False)


@pytest.mark.parametrize("seed", range(RUNS))
def test_nothing_is_lost(seed, monkeypatch):
    draw = random.Random(seed)
    ready = draw.choice([3, 10, 30, 60, CALLS + 1])
    job = type("Job", (Told,), {})
    load = ProgramFile.load
    monkeypatch.setattr(elsewhere, "Job", job)
    monkeypatch.setattr(elsewhere, "_jobs", elsewhere._Jobs())
    monkeypatch.setattr(ProgramFile, "load", lambda self: load(self) if job.is_there else None)
    trainer = Trainer()
    kept = [trainer.state(0), trainer.state(1)]
    rows = 4
    for call in range(CALLS):
        job.is_there = call >= ready
        match draw.choice(["train"] * 12 + ["rate", "load", "keep", "rows", "fail", "interrupt", "evaluate"]):
            case "rate":
                for optimizer in trainer.optimizers:
                    optimizer.param_groups[0]["lr"] *= 0.9
            case "load":
                trainer.load(0, kept[0])
                trainer.load(1, kept[1])
            case "keep":
                kept = [trainer.state(0), trainer.state(1)]
            case "rows":
                rows = draw.choice([4, 7])
            case "evaluate":
                x = torch.randn(3, 6, dtype=torch.double)
                torch.testing.assert_close(trainer.model.eval()(x), trainer.twin.eval()(x))
                trainer.model.train()
                trainer.twin.train()
            case "fail":
                trainer.fails = True
                with pytest.raises(LookupError, match="the user's own"):
                    trainer.step(torch.randn(rows, 6, dtype=torch.double), torch.randint(3, (rows,)))
                trainer.fails = False
            case "interrupt":
                interrupted(trainer, rows, draw.uniform(1e-4, 3e-2))
        x, y = torch.randn(rows, 6, dtype=torch.double), torch.randint(3, (rows,))
        torch.testing.assert_close(trainer.step(x, y), trainer.eager(x, y).detach())
        trainer.is_as_eager()
    assert bool(trainer.step.graphs) == (ready < CALLS - 10)


def interrupted(trainer, rows, after_s):
    """Press Ctrl-C soon after a call began; what it has done by then is the twin's from now on."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        for _ in range(1000):
            trainer.step(torch.randn(rows, 6, dtype=torch.double), torch.randint(3, (rows,)))
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        torch.set_grad_enabled(True)  # one interrupt of 300 leaves it off, as it comes when PyTorch enters no_grad
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()
    trainer.load(1, trainer.state(0))


@pytest.fixture(autouse=True)
def alarm_is_ctrl_c():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)
