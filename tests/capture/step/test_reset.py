"""``step.reset()``: graphs and what was learnt are gone, and nothing of the user's."""

import gc
import weakref

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import assert_same, interpret


class World:
    def __init__(self):
        self.model = nn.Linear(3, 2)
        with torch.no_grad():
            self.model.weight.fill_(0.1)
            self.model.bias.zero_()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.is_asked = False

    def train(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_asked:
            return [loss, -loss][loss.item() < 0]
        return loss

    def in_parts(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with ms.eager_region():
            kept = loss.item()
        return loss * 2, kept


@pytest.mark.parametrize("name", ["train", "in_parts"])
def test_graphs_are_gone_and_the_next_calls_capture_as_eager_computes(name):
    ours, theirs = World(), World()
    step = ms.step(getattr(ours, name), strict=True, engine="serial")
    eager, x = getattr(theirs, name), torch.ones(4, 3)
    for _ in range(2):
        for _ in range(3):
            assert_same(step(x), eager(x))
            assert_same(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()))
        assert step.graphs
        graphs = [weakref.ref(graph.executable) for graph in step.graphs]
        step.reset()
        gc.collect()
        assert not step.graphs
        assert [graph() for graph in graphs] == [None] * len(graphs)


def test_what_fell_back_is_tried_again():
    world = World()
    world.is_asked = True
    step = Step(world.train, build=interpret)
    with pytest.warns(FallbackWarning, match="train"):
        for _ in range(3):
            step(torch.ones(4, 3))
    world.is_asked = False
    step.reset()
    assert not step.fallbacks
    for _ in range(2):
        step(torch.ones(4, 3))
    assert len(step.graphs) == 1
