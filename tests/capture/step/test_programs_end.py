"""A program that has ended leaves nothing: a notebook's cell that runs again, a script that another one runs."""

import functools
import gc
import logging
import time
import weakref

import pytest
import torch
from torch import nn

import millstream as ms
from tests import networks
from tests.capture.worlds import interpret

PROGRAM = """
import dataclasses
import torch
import millstream as ms
from millstream.capture import Step

@dataclasses.dataclass
class Batch:
    x: torch.Tensor

class Batches:
    def __iter__(self):
        return (Batch(torch.ones(2, 3)) for _ in range(100))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, batch):
        return self.linear(batch.x).sum()

class Optimizer(torch.optim.SGD):
    pass

class Losses(list):
    pass

def add(value):
    losses.append(float(value))

net, losses = Net(), Losses()
optimizer = Optimizer(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

def train(batch):
    optimizer.zero_grad()
    loss = net(batch)
    loss.backward()
    optimizer.step()
    scheduler.step()
    ms.callback(add, loss)

step = Step(train, build=build)
feed = ms.feed(Batches(), "cpu", prefetch=True)
for batch in feed:
    step(batch)
    if len(losses) == 4:
        break
assert len(step.graphs) == 1
"""


def test_classes_modules_steps_and_feeds_of_a_program_go_with_it():
    names = {"__name__": "program", "build": interpret}
    exec(PROGRAM, names)
    held = {name: weakref.ref(value) for name, value in names.items() if name[0].isalpha()}
    del names
    for _ in range(2):  # the feed's end is part of the first, and holds what it was to give next
        gc.collect()
    held = {name for name, reference in held.items() if reference() is not None}
    assert held == {"torch", "ms", "dataclasses", "Step", "build"}


def training(how):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(x):
        loss = net(x).sum()
        if how == "reads a clock":
            loss = loss * time.time()
        elif how == "indexes":
            loss = [loss, loss * 2][loss.item() > 0]
        elif how == "fails as it is traced":
            loss = torch.sparse.sum((loss * torch.eye(2)).to_sparse())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ms.step(train)


REFUSED = ("reads a clock", "indexes", "fails as it is traced")
PROGRAMS = {
    **{how: functools.partial(training, how) for how in ("is captured", *REFUSED)},
    "a model": lambda: ms.compile(nn.Linear(3, 2)),
    "a model with a break": lambda: ms.compile(lambda x: x * 2 if x.sum() > 0 else x),
}


@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_batch_is_kept(program, monkeypatch):
    # What PyTorch logs of a failure has its frames, and pytest keeps that.
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    compiled, batches = PROGRAMS[program](), []
    for _ in range(4):
        x = torch.ones(4, 3)
        compiled(x)
        batches.append(weakref.ref(x))
        del x
    gc.collect()
    assert [batch() is not None for batch in batches] == [False] * 4
    assert bool(getattr(compiled, "fallbacks", ())) == (program in REFUSED)


def test_a_batch_does_not_live_until_a_collection():
    """Not that of the first call, which is eager, nor that of the one which is captured."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @ms.step(strict=True)
    def step(x, y):
        return networks.train_once(model, optimizer, x, y)

    batches, classes = [], torch.tensor([0, 1, 1])
    gc.disable()
    try:
        for _ in range(4):
            x = torch.ones(3, 4)
            step(x, classes)
            batches.append(weakref.ref(x))
            del x
        assert [batch() for batch in batches] == [None] * 4
    finally:
        gc.enable()
