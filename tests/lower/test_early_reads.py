"""Weights are read before the kernel in front has ended where they were there before it began, and only there."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from millstream.cost import Roofline
from millstream.engine.early_reads import find_early_reads
from millstream.graph import KernelKind, Launch, Record, Wait
from millstream.lower.convolutions.early_reads import note_early_reads
from millstream.lower.program import Call
from millstream.schedule import plan_graph, plan_serial
from millstream.testing import random_graph
from tests.lower.convolutions import own_kernels, pretended_gpu, run_everywhere

__all__ = ["own_kernels", "pretended_gpu"]  # fixtures


@dataclass
class Calls:
    """As much of a program as is looked at."""

    graph: object
    calls: list

    def base(self, name):
        return name


def reachable(plan):
    """For each launch, by kernel, the kernels that come before it by streams and events, found step by step."""
    known, recorded, before = {stream: set() for stream in range(plan.num_streams)}, {}, {}
    for step in plan.steps:
        match step:
            case Launch(kernel, stream):
                before[kernel] = set(known[stream])
                known[stream].add(kernel)
            case Record(event, stream):
                recorded[event] = set(known[stream])
            case Wait(event, stream):
                known[stream] |= recorded[event]
    return before


@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([1, 2, 4]), st.sampled_from(["list", "chains"]))
def test_what_is_read_early_was_written_before_the_kernel_in_front_began(seed, size, streams, policy):
    graph = random_graph(random.Random(seed), size)
    calls = [
        Call(print, (), {}, early=kernel.reads[:2] if kernel.kind is KernelKind.CONV else None)
        for kernel in graph.kernels
    ]
    plan = plan_graph(graph, Roofline().estimate(graph), streams, policy)
    found = find_early_reads(Calls(graph, calls), plan)
    before, in_front, wanted = reachable(plan), {}, set()
    for step in plan.steps:
        if not isinstance(step, Launch):
            continue
        kernel, previous = step.kernel, in_front.get(step.stream)
        names = {graph.storage(name) for name in calls[kernel].early or ()}
        writers = {k for k in before[kernel] if names & {graph.storage(name) for name in graph.kernels[k].writes}}
        if names and previous is not None and writers <= before[previous]:
            waits = calls[previous].early is not None or graph.kernels[previous].kind is KernelKind.FUSED
            wanted |= {kernel} if waits else set()
        in_front[step.stream] = kernel
    assert found == wanted


class Chain(nn.Module):
    """Small convolutions one behind the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(("layout", "fewest"), [(torch.channels_last, 3), (torch.contiguous_format, 1)])
def test_in_a_network(own_kernels, layout, fewest):
    x = torch.randn(1, 16, 6, 6, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    model = Chain().double().eval().to(memory_format=layout)
    program, results = run_everywhere(model, x)
    assert all(torch.equal(result, results[0]) for result in results)
    noted = [call for call in program.calls if call.early]
    assert len(noted) == 4
    assert own_kernels["early"] >= fewest * len(results)
    assert len(find_early_reads(program, plan_serial(program.graph))) >= fewest


def test_a_weight_that_is_made_right_in_front_is_waited_for(own_kernels):
    x = torch.randn(1, 16, 6, 6, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()).double().eval()
    program, _ = run_everywhere(model, x)
    plan = plan_serial(program.graph)
    (kernel,) = (k for k, call in enumerate(program.calls) if call.early)
    (made,) = (
        k for k in range(len(program.calls)) if set(program.graph.kernels[k].writes) & set(program.calls[kernel].early)
    )
    assert made == kernel - 1
    assert not find_early_reads(program, plan)


def test_what_the_program_changes_is_not_read_early(own_kernels):
    x = torch.randn(1, 16, 6, 6, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    program, _ = run_everywhere(Chain().double().eval().to(memory_format=torch.channels_last), x)
    weights = {name for call in program.calls for name in call.early or ()}
    assert weights
    changed = note_early_reads(replace(program, mutated=frozenset(map(program.base, weights))))
    assert not any(call.early for call in changed.calls)
