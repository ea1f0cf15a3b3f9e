"""Runs to report on."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from millstream.cost import Costs, KernelCost
from millstream.graph import Kernel, KernelGraph, KernelKind, Span, Timeline
from millstream.report import ProgramReport
from millstream.schedule import POLICIES, plan_graph
from millstream.simulate import simulate
from millstream.testing import random_graph


def costs_of(*durations_ns, wait_ns=0, shares=(0.0, 0.0)):
    return Costs(tuple(KernelCost(duration_ns, *shares) for duration_ns in durations_ns), wait_ns)


def report_of(plan, **more):
    return ProgramReport(plan, "inference", "graph", 4096, 1.5, **more)


def traced(plan, costs, rng):
    """Make what a trace of the device could give: gaps, operators in two pieces, and work that no plan knows."""
    spans = []
    for span in simulate(plan, costs).spans:
        start_ns, end_ns = span.start_ns * 2 + rng.randint(0, 1), span.end_ns * 2
        middle_ns = rng.randint(min(start_ns, end_ns), end_ns)
        spans += [
            replace(span, start_ns=min(start_ns, end_ns), end_ns=middle_ns),
            Span("memset", span.stream, middle_ns, middle_ns),
        ]
        spans += [replace(span, start_ns=middle_ns, end_ns=end_ns)] if rng.random() < 0.5 else []
    spans.sort(key=lambda span: span.start_ns)
    end_ns = max((span.end_ns for span in spans), default=0) + rng.randint(0, 100)
    return Timeline(tuple(spans), plan.num_streams, end_ns)


@st.composite
def runs(draw, max_kernels=60):
    """A plan of a random graph, its costs, and a timeline of it: predicted, or as if traced."""
    rng = random.Random(draw(st.integers(0, 2**32), label="seed"))
    graph = random_graph(rng, draw(st.integers(1, max_kernels), label="kernels"), locality=rng.random())
    shares = [rng.choice((0.0, 0.1, 1.0)) for _ in range(2 * len(graph.kernels))]
    durations_ns = [rng.choice((1, 10, 1000, 54_321)) for _ in graph.kernels]
    costs = Costs(
        tuple(map(KernelCost, durations_ns, shares[::2], shares[1::2])), draw(st.sampled_from([0, 1500]), label="wait")
    )
    policy = draw(st.sampled_from(sorted(POLICIES)), label="policy")
    plan = plan_graph(graph, costs, draw(st.integers(1, 8), label="streams"), policy)
    timeline = traced(plan, costs, rng) if draw(st.booleans(), label="traced") else simulate(plan, costs)
    return plan, costs, timeline


EMPTY = KernelGraph("nothing", (), ())

HOSTILE = "</script><b>\"'&]]>{{DATA}}\x00\x1f\ud800\ufffe→"


def with_hostile_names(graph):
    """Give a graph and its kernels names that end elements, attributes and scripts."""
    kernels = [
        Kernel(
            k.id,
            HOSTILE,
            KernelKind.GEMM,
            k.device,
            k.reads,
            k.writes,
            k.allocates,
            1,
            1,
            (HOSTILE,) * (k.id % 2),
            HOSTILE,
        )
        for k in graph.kernels
    ]
    return replace(graph, name=HOSTILE, kernels=tuple(kernels))
