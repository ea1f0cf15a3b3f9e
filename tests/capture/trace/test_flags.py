"""Branches on what the state keeps: the graph holds for one outcome, which is asked in each call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from millstream._torch.workarounds import without
from millstream.capture import Step
from millstream.capture.trace.branches.flags import StateFlag
from tests.capture.worlds import assert_same, interpret
from tests.processes import bring_compiled_code

KINDS = {
    "bool": (torch.tensor(False), lambda flag: not flag),
    "item": (torch.tensor(0), lambda flag: not flag.item()),
    "compared": (torch.zeros(1), lambda flag: flag == 0),
    "computed": (torch.zeros(4), lambda flag: (flag.sum() < 4).all()),
}


class Normalized(nn.Module):
    """Takes its bias from the first batch, as codebooks and ``ActNorm`` do."""

    def __init__(self, kind):
        super().__init__()
        flag, self.is_unset = KINDS[kind]
        self.register_buffer("initialized", flag.clone())
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        if self.is_unset(self.initialized):
            with torch.no_grad():
                self.bias.copy_(-x.unique(dim=0).mean(0))  # whose shape depends on values
                self.initialized.data.fill_(1)
        return x + self.bias


def train(wrap, kind, make_optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Normalized(kind))
    optimizer = make_optimizer(model.parameters(), lr=0.1)

    @wrap
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for number in range(9):
        if number == 4:
            model[1].initialized.data.fill_(0)  # whose version stays
        if number == 7:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        losses.append(step(torch.randn(4, 3)))
    return [losses, model.state_dict()], step


def captured(function, **options):
    return Step(function, build=interpret, strict=True, **options)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", KINDS)
def test_first_values_are_made_once_and_calls_after_that_are_replayed(kind, make_optimizer):
    ours, step = train(captured, kind, make_optimizer)
    assert_same(ours, train(lambda function: function, kind, make_optimizer)[0])
    (graph,) = step.graphs
    assert graph.num_runs >= 5


@pytest.mark.parametrize("waits", [False, True])
def test_flags_that_are_not_written_have_a_graph_for_each_outcome(monkeypatch, waits):
    monkeypatch.setattr(StateFlag, "waits", waits)  # as on a device
    flag = torch.tensor(True)
    x = torch.ones(2)

    @captured
    def step(x):
        return x[x > 0] * 2 if x.dim() == 2 else x * 2 if flag else x + 1

    for outcome in (True, False, True, False):
        flag.fill_(outcome)
        assert_same(step(x), x * 2 if outcome else x + 1)
    # On a device both ways are one graph, since to ask it would take time.
    assert [graph.num_runs for graph in step.graphs] == ([4] if waits else [2, 2])


def test_device_is_asked_where_both_ways_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(StateFlag, "waits", True)
    ours, step = train(captured, "bool")
    assert_same(ours, train(lambda function: function, "bool")[0])
    (graph,) = step.graphs
    assert any("test_flags.py" in line for line in graph.effects.waits)


def test_flags_that_every_call_writes_go_both_ways():
    def trained(wrap):
        count, total = torch.tensor(0), torch.zeros(2)

        @wrap
        def step(x):
            if count % 3 == 0:
                total.add_(x)
            else:
                total.sub_(1)
            count.add_(1)
            return total * 2

        return [step(torch.full((2,), float(number))) for number in range(8)], step

    ours, step = trained(captured)
    assert_same(ours, trained(lambda function: function)[0])
    (graph,) = step.graphs
    assert graph.num_runs >= 6


def test_graphs_are_checked_as_they_were_captured(tmp_path, monkeypatch):
    """The first one, whose flag the step was not yet seen to write, too, and those whose traces were on disk."""
    bring_compiled_code(tmp_path)
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MILLSTREAM_TRACES", raising=False)

    def trained(wrap):
        flag, mean = torch.tensor(False), torch.zeros(3)

        @wrap
        def step(x):
            if flag:
                mean.lerp_(x.mean(0), 0.5)
            else:
                mean.copy_(x.mean(0))
                flag.fill_(True)
            return mean * 2

        for number in range(12):
            if number in (5, 6):
                flag.fill_(False)
            yield step(torch.full((2 + (5 <= number <= 8), 3), float(number)))

    def checked(function):
        return captured(function, check=1, dynamic=False)

    for _ in range(2):
        assert_same([*trained(checked)], [*trained(lambda function: function)])


def test_another_tensor_in_the_place_of_a_flag_is_noticed():
    model = nn.Module()
    model.flag = torch.tensor(True)

    @captured
    def step(x):
        return x * 2 if model.flag else x + 1

    x = torch.ones(2)
    for outcome in (True, True, False, True):
        model.flag = torch.tensor(outcome)
        assert_same(step(x), x * 2 if outcome else x + 1)


def test_branches_on_flags_can_be_taken_as_all_others_are():
    model = nn.Module()
    model.flag = torch.tensor(True)
    step = captured(lambda x: x * 2 if model.flag else x + 1)
    x = torch.ones(2)
    with without(["flags"]):
        for outcome in (True, True, False, True):
            model.flag.fill_(outcome)
            assert_same(step(x), x * 2 if outcome else x + 1)
    (graph,) = step.graphs  # for both ways
    assert graph.num_runs == 4
