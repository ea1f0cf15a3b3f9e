"""Plans on several streams: the text that runs them, the arguments that ask for them, and what is chosen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Costs, KernelCost
from millstream.device import context
from millstream.engine.arena import bind_arena
from millstream.engine.assembly import with_environment
from millstream.engine.plan_source import compile_plan
from millstream.errors import ArgumentError
from millstream.schedule import Scheduling, assign_offsets, plan_graph, plan_serial
from tests import networks


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def named(target, name):
    def function(*args, **kwargs):
        return target(*args, **kwargs)

    function.__name__ = name
    return function


def test_operators_may_be_called_anything():
    """Also like what the text itself uses, or like another one with a number after it."""
    program, inputs, expected = networks.lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    program = program.program
    costs = Costs(tuple(KernelCost(1000) for _ in program.graph.kernels))
    plan = plan_graph(program.graph, costs, 2)
    for names in (
        ["fork"],
        ["event_0"],
        ["stream_1"],
        ["enter"],
        ["v_buf0"],
        ["lambda"],
        ["v", "stream"],
        ["k", "k", "k_1"],
    ):
        calls = tuple(
            replace(call, target=named(getattr(call.target, "binding", call.target), names[index % len(names)]))
            for index, call in enumerate(program.calls)
        )
        run = compile_plan(replace(program, calls=calls), plan, context=context("cpu"))
        assert torch.equal(run(list(inputs))[0], expected)
        for lender, event in run.events:
            lender.events.release(event)


@pytest.mark.parametrize(
    ("policy", "memory"), [("list", "packed"), ("slack", "arena"), ("chains", "pools"), ("chains", "packed")]
)
def test_every_number_of_streams_gives_the_same(policy, memory):
    program, inputs, expected = networks.lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    graph = program.program.graph
    costs = Costs(tuple(KernelCost(1000) for _ in graph.kernels), wait_ns=100)
    for num_streams in (2, 4, 8):
        plan = plan_graph(graph, costs, num_streams, policy, packed=memory == "packed")
        assert plan.num_streams > 1
        layout = assign_offsets(plan) if memory == "arena" else plan.layout
        check_plan(plan, layout)
        bound = bind_arena(program.program, layout) if layout else None
        run = compile_plan(program.program, plan, bound, context=context("cpu"))
        assert torch.equal(run(list(inputs))[0], expected)
        assert len(run.events) > 1
        for lender, event in run.events:
            lender.events.release(event)


@torch.no_grad()
def test_text_without_numbers_is_compiled_once_for_all_sizes():
    model = nn.Sequential(nn.Linear(5, 7), nn.Softmax(0))
    compiled = ms.compile(model, engine="serial", dynamic=True, strict=True)
    batches = [torch.randn(size, 5) for size in (3, 4, 6)]
    for x in batches:
        compiled(x)
    made = [(each.lowered.program, each.plan) for each in executables(compiled)]
    assert len({compile_plan(*each).source for each in made}) == len(batches)
    runs = [compile_plan(*each, repeats=True) for each in made]
    assert len({run.__code__ for run in runs}) == 1
    by_size = {program.tensors["arg3_1"].size: run for (program, _), run in zip(made, runs, strict=True)}
    results = [by_size[tuple(x.shape)]([model[0].weight, model[0].bias, len(x), x])[0] for x in batches]
    for result, x in zip(results, batches, strict=True):
        networks.assert_close(result, model(x))


def test_observed_kernels_are_launched_by_the_observer():
    program, inputs, expected = networks.lowered(networks.Mlp().eval(), networks.example(networks.Mlp)[0])
    launched = []

    def observe(kernel, launch, updated):
        launched.append(kernel)
        assert all(isinstance(tensor, torch.Tensor) for tensor in updated)
        return launch()

    run = compile_plan(program.program, plan_serial(program.program.graph), observe=observe)
    assert torch.equal(run(list(inputs))[0], expected)
    assert launched == [kernel.id for kernel in program.program.graph.kernels]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streams": 0}, "streams=0"),
        ({"streams": "many"}, "'many'"),
        ({"streams": 99999999999}, "streams=99999999999"),
        ({"policy": "fastest"}, "'fastest'.*'list'"),
        ({"memory": 0.5}, "memory=0.5"),
        ({"engine": "turbo"}, "'turbo'"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments, message):
    for entry in (ms.compile, ms.step):
        with pytest.raises(ArgumentError, match=message):
            entry(lambda x: x, **arguments)


@pytest.mark.parametrize("strict", [False, True])
def test_a_budget_below_one_streams_need_is_refused(strict):
    """Not worked around either: a user should hear of what they ask for by mistake."""
    compiled = ms.compile(networks.Mlp().eval(), memory=1, strict=strict)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="memory=1 bytes is too little"):
            compiled(networks.example(networks.Mlp)[0])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("number", ["lots", "0", "-1", "99999999999"])
def test_the_environment_says_how_many_streams(monkeypatch, strict, number):
    monkeypatch.setenv("MILLSTREAM_NSTREAMS", number)
    compiled = ms.compile(networks.Mlp().eval(), strict=strict)
    with pytest.raises(ArgumentError, match=f"MILLSTREAM_NSTREAMS='{number}' is no number of streams; give 1 to"):
        compiled(networks.example(networks.Mlp)[0])


@pytest.mark.parametrize("number", ["auto", "3", ""])
def test_the_environment_wins_over_the_argument(monkeypatch, number):
    monkeypatch.setenv("MILLSTREAM_NSTREAMS", number)
    assert with_environment(Scheduling(2)) == Scheduling({"auto": None, "3": 3, "": 2}[number])


def test_a_backward_pass_that_needs_more_than_the_budget_is_refused():
    """The forward pass fits; the backward pass is compiled with it or when it is first needed."""
    model = networks.Mlp()
    x, _ = networks.example(networks.Mlp)
    with torch.enable_grad():
        probe = ms.compile(model, strict=True)
        probe(x).sum().backward()
        forward, backward = (executable.peak_bytes for executable in executables(probe))
        assert backward > forward
        torch._dynamo.reset()
        compiled = ms.compile(model, memory=backward - 1)
        with pytest.raises(ArgumentError, match=f"memory={backward - 1} bytes is too little: Mlp.backward"):
            compiled(x).sum().backward()
