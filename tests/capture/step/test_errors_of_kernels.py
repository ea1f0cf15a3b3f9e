"""After a kernel has raised on a CPU everything is as it was before the call, and the next call works."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from tests.networks import assert_close


class Classifier(nn.Module):
    """Writes statistics between the first kernel that may raise and the last."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, 5)

    def forward(self, x):
        return self.output(self.norm(self.embedding(x)))


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01, eps=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.num_steps = 0

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.num_steps += 1
        return loss

    def state(self):
        entries = [value for entry in self.optimizer.state.values() for value in entry.values()]
        counts = [torch.tensor(float(n)) for n in (self.num_steps, self.scheduler.last_epoch)]
        return [*self.model.state_dict().values(), *entries, *counts]


def example(size, **changes):
    x, y = torch.arange(size) % 10, torch.arange(size) % 5
    x[1], y[1] = changes.get("x", 3), changes.get("y", 3)
    return x, y


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


BAD = [{"x": 10}, {"y": 5}, {"x": 10, "y": -7}]


def assert_refused(step, training, size):
    """A step refuses what eager mode refuses, in its words, and changes nothing."""
    for changes in BAD:
        before = [value.clone() for value in training.state()]
        with pytest.raises(IndexError) as expected:
            Training().step(*example(size, **changes))
        with pytest.raises(IndexError) as found:
            step(*example(size, **changes))
        assert str(found.value) == str(expected.value)
        assert all(map(torch.equal, training.state(), before))
        assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.usefixtures("lowered_once")
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_what_kernels_refuse_changes_nothing(engine):
    ours, eager = Training(), Training()
    step = ms.step(ours.step, engine=engine, streams=2 if engine == "threads" else "auto", strict=True)
    for _ in range(5):  # by then a plan is chosen
        step(*example(8))
        eager.step(*example(8))
    assert_refused(step, ours, 8)
    assert_close(step(*example(8)), eager.step(*example(8)))
    assert_close(ours.state(), eager.state())


def test_what_kernels_on_several_threads_refuse_changes_nothing(two_threads):
    ours, eager = Training(), Training()
    step, size = ms.step(ours.step, engine="serial", strict=True), 5000
    for training in (step, eager.step):
        training(*example(size))
        training(*example(size))
    assert_refused(step, ours, size)
    assert_close(step(*example(size)), eager.step(*example(size)))
    assert_close(ours.state(), eager.state())


def test_a_class_that_there_is_not_is_refused_where_nobody_reads_the_loss():
    layer = nn.Linear(4, 5)
    step = ms.step(lambda x, y: (F.cross_entropy(layer(x), y) / 2).backward(), engine="serial", strict=True)
    x, y = torch.randn(8, 4), torch.arange(8) % 5
    for _ in range(2):
        step(x, y)
    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        step(x, y + 1)


def test_what_a_kernel_of_a_model_refuses_changes_no_statistics():
    model = Classifier()
    compiled = ms.compile(lambda x, y: F.cross_entropy(model(x), y), strict=True)
    compiled(*example(8))
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(IndexError, match="out of range"):
        compiled(*example(8, y=5))
    assert all(map(torch.equal, model.state_dict().values(), before))
