"""A process of its own: with a process group of one, and with none."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.capture import Step
from tests.capture.worlds import interpret
from tests.processes import output_of


def test_no_process_group():
    model = nn.Linear(4, 2)

    @ms.step(data_parallel=True)
    def step(x):
        model(x).sum().backward()

    with pytest.raises(ms.ArgumentError, match="init_process_group"):
        step(torch.ones(3, 4))
    assert model.weight.grad is None


def test_argument_is_no_group():
    with pytest.raises(ms.ArgumentError, match="process group"):
        ms.step(lambda x: x, data_parallel=2)


def test_group_of_one_has_nothing_to_reduce(tmp_path):
    """One graph, not cut, with a wrapper and without; in a copy of the step, too."""
    said = output_of(
        f"""
import copy
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from millstream.capture import Step
from tests.capture.worlds import interpret

dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://{tmp_path / "store"}")
for wraps in (True, False):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    alone = copy.deepcopy(model)
    if wraps:
        model = DistributedDataParallel(model)
    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss
    captured = Step(step, build=interpret, strict=True, data_parallel=not wraps)
    captured = copy.deepcopy(captured) if not wraps else captured
    for _ in range(3):
        loss = captured(torch.ones(3, 4) * 2)
        alone(torch.ones(3, 4) * 2).pow(2).sum().backward()
    (graph,) = captured.graphs
    assert not any("exchange" in str(node.target) for node in graph.gm.graph.nodes)
    if wraps:
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
print("same")
"""
    )
    assert said.strip() == "same"


def test_collective_is_named_where_it_is_not_captured():
    """By its operator, without a process group."""
    model = nn.Linear(4, 2)

    def step(x):
        return torch.ops._c10d_functional.wait_tensor(model(x))

    with pytest.raises(ms.CaptureError, match="collective wait_tensor"):
        Step(step, build=interpret, strict=True)(torch.ones(3, 4))
