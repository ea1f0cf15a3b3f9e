"""Any number of processes, of which only one is there: what all of them would lower, plan and exchange."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import millstream as ms
from millstream._torch.distributed.fake_group import among_fake_processes
from millstream.api.explaining import _agreed
from millstream.engine.parallel.described import assumed_network
from millstream.graph import KernelKind, format_plan
from millstream.schedule import plan_graph
from millstream.simulate import bucket_bytes, operation_of, plan_beside

GOLDEN = Path(__file__).parents[1] / "golden" / "made_up_ranks.txt"


def captured(size, rank):
    """Plan and costs of a step, as one rank of many makes them; in segments and as one graph."""
    with among_fake_processes(size, rank):
        dist.init_process_group()
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)), bucket_cap_mb=0.001
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @ms.step(strict=True)
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(3):
            step(torch.ones(8, 20))
        (engine,) = _agreed(step)
        found = engine.describe()
    return found.plan, found.costs


def digest(plan):
    return hashlib.sha256(format_plan(plan).encode()).hexdigest()


def outline(plan):
    """What is exchanged, and what stands before and after it; kernels are those of whatever compiler there is."""
    graph, lines = plan.graph, []
    for kernel in graph.kernels:
        if kernel.kind is KernelKind.COLLECTIVE:
            lines.append(f"{operation_of(kernel)}  {bucket_bytes(graph, kernel)} bytes  {kernel.name}")
        elif not lines or lines[-1] != "kernels":
            lines.append("kernels")
    return lines


@pytest.mark.parametrize(("told", "per_host"), [("8", 8), ("", 16), ("16", 16), ("none", 16), ("0", 16)])
def test_network_is_that_of_as_many_processes_to_a_host_as_torchrun_says(told, per_host, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    network = assumed_network(16, on_gpu=True)
    assert network.per_host == per_host
    assert (network.between is None) is (per_host == 16)


def test_all_ranks_of_any_number_have_the_same_plans():
    plans = [captured(size, rank) for size, rank in ((2, 0), (4096, 0), (4096, 4095))]
    assert len({(digest(plan), digest(plan_beside(plan.graph))) for plan, _ in plans}) == 1
    by_cost = [digest(plan_graph(plan.graph, costs, 3, "list")) for plan, costs in plans[1:]]
    assert len(set(by_cost)) == 1  # among fewer processes collectives cost less, and others may be begun first
    text = "\n".join(outline(plans[0][0])) + "\n"
    if os.environ.get("MILLSTREAM_GOLDEN") == "write":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
