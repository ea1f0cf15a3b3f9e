"""A program that has ended leaves nothing: a notebook's cell that runs again, a script that another one runs."""

import gc
import weakref

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
