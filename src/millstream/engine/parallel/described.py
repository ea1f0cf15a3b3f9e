"""Describe the exchanges of a step as a plan of kernels and collectives together, for explanations."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from millstream.cost import GLOO, NVLINK, Costs, Network, parse_link
from millstream.data_parallel.agreement import Agreement
from millstream.engine.parallel.segmented import SegmentedEngine
from millstream.engine.parallel.whole import WholeGraph, WholeOnHost, costs_of
from millstream.graph import Plan
from millstream.lower import Lowered
from millstream.schedule import plan_serial
from millstream.simulate import costs_on, plan_beside


@dataclass(frozen=True)
class Described:
    """A step that exchanges something.

    Attributes:
        plan: Of kernels and collectives.
        costs: Of both.
        is_one_graph: Whether collectives are among its kernels; otherwise the host issues them between segments.
        num_processes: That exchange.
        source: Where the times of collectives are from; empty where they were measured.
        is_calculated: No kernel was measured.
        arrivals_ns: When each process came to begin the last steps, as far as that is known.
    """

    plan: Plan
    costs: Costs
    is_one_graph: bool
    num_processes: int
    source: str
    is_calculated: bool
    arrivals_ns: tuple[tuple[int, ...], ...]


def describe(segmented: SegmentedEngine, lowered: Lowered, whole: WholeGraph | WholeOnHost | None) -> Described:
    """Describe how a step runs at present.

    Args:
        segmented: Its segments.
        lowered: All of it as one program.
        whole: What runs it as one graph; ``None`` where nothing does.
    """
    graph, first = lowered.program.graph, segmented.exchanges[0]
    num_processes = dist.get_world_size(first.group) if dist.is_initialized() else 1
    agreement = first.agreement
    arrivals = tuple(map(tuple, agreement.arrivals)) if isinstance(agreement, Agreement) else ()
    if isinstance(whole, WholeGraph):
        return Described(whole.plan, whole.costs, True, num_processes, "", False, arrivals)
    plan = plan_beside(graph, eager=True) if whole is None and first.is_beside else plan_serial(graph)
    is_calculated = all(each is None or each.costs is None for each in segmented.executables)
    network = assumed_network(num_processes, on_gpu=first.memory.is_cuda)
    source = "; ".join(network.describe()) if network.between else network.within.describe()
    costs = costs_of(lowered, segmented.segments, segmented.executables)
    costs = costs_on(plan, costs, network, num_processes)
    return Described(plan, costs, whole is not None, num_processes, source, is_calculated, arrivals)


def assumed_network(num_processes: int, *, on_gpu: bool) -> Network:
    """Return what is between processes as far as anybody has said.

    As many to a host as torchrun says, or all on one.
    """
    link = NVLINK if on_gpu else GLOO
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_host = int(told) if told.isdecimal() and 0 < int(told) < num_processes else num_processes
    return Network(link, parse_link("ib-400") if per_host < num_processes else None, per_host)
