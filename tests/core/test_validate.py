from dataclasses import replace

import pytest

from millstream.errors import GraphError, PlanError
from millstream.graph import (
    Allocate,
    Buffer,
    Free,
    Kernel,
    KernelKind,
    Launch,
    Plan,
    Record,
    Role,
    Wait,
    parse_graph,
    validate_graph,
    validate_plan,
)
from millstream.schedule import plan_serial

GRAPH = parse_graph("""
graph good
inputs   (x, s)
outputs  (y, x)
buffers
  x  input      cpu  8
  s  state      cpu  8
  c  constant   cpu  8
  t  temporary  cpu  8
  v  temporary  cpu  8  view of t
  u  temporary  cpu  8
  y  output     cpu  8
kernels
  0  fused    first   cpu  (x, c) -> (t)       from "model.py:1 in forward"
  1  library  second  cpu  (v) -> (u)          allocates (u)
  2  fused    third   cpu  (u, s) -> (y, s)
""")


def with_kernel(number, **changes):
    kernels = list(GRAPH.kernels)
    kernels[number] = replace(kernels[number], **changes)
    return replace(GRAPH, kernels=tuple(kernels))


def with_buffer(name, **changes):
    buffers = [replace(buffer, **changes) if buffer.id == name else buffer for buffer in GRAPH.buffers]
    return replace(GRAPH, buffers=tuple(buffers))


def test_the_good_graph_passes():
    validate_graph(GRAPH)
    validate_plan(plan_serial(GRAPH))


@pytest.mark.parametrize(
    ("graph", "message", "kernel", "buffer"),
    [
        (replace(GRAPH, buffers=(*GRAPH.buffers, GRAPH.buffers[0])), "buffer 'x' appears twice", None, "x"),
        (with_buffer("t", num_bytes=-1), "buffer 't' has -1 bytes", None, "t"),
        (with_buffer("v", alias_of="z"), "buffer 'v' is a view of unknown buffer 'z'", None, "v"),
        (with_buffer("t", alias_of="v"), "views form a cycle", None, None),
        (with_buffer("v", device="cuda:0"), "'v' on cuda:0 is a view of 't' on cpu", None, "v"),
        (replace(GRAPH, inputs=("x", "s", "z")), "'z' is input 2 but unknown", None, "z"),
        (replace(GRAPH, inputs=("x", "s", "t")), "'t' is input 2 but has role temporary", None, "t"),
        (replace(GRAPH, inputs=("x", "s", "x")), "'x' is listed again as input 2", None, "x"),
        (replace(GRAPH, inputs=("x",)), "'s' has role state but is not among the inputs", None, "s"),
        (replace(GRAPH, outputs=("y", "z")), "'z' is output 1 but unknown", None, "z"),
        (replace(GRAPH, outputs=("y", "t")), "'t' is output 1 but has role temporary", None, "t"),
        (replace(GRAPH, outputs=("y", "v")), "'v' is output 1, a view of 't', but has role temporary", None, "v"),
        (replace(GRAPH, outputs=("x",)), "'y' has role output but is not returned", None, "y"),
        (with_kernel(2, writes=("s",)), "'y' is output 0 but no kernel writes it", None, "y"),
        (with_kernel(1, id=5), "kernel 5 'second' stands at position 1", "second", None),
        (with_kernel(1, reads=("z",)), "kernel 1 'second' reads unknown buffer 'z'", "second", "z"),
        (with_kernel(1, writes=("z",)), "kernel 1 'second' writes unknown buffer 'z'", "second", "z"),
        (with_kernel(1, allocates=("z",)), "kernel 1 'second' allocates unknown buffer 'z'", "second", "z"),
        (with_kernel(1, flops=-1), "num_bytes=0 and flops=-1", "second", None),
        (
            with_kernel(0, reads=("u",)),
            r"\(model.py:1 in forward\) reads temporary 'u', which no earlier",
            "first",
            "u",
        ),
        (with_kernel(0, reads=("v",)), "reads temporary 't', which no earlier kernel writes", "first", "t"),
        (with_kernel(1, reads=("v", "y")), "reads output 'y', which no earlier kernel writes", "second", "y"),
        (with_kernel(0, writes=("t", "c")), "writes constant 'c'", "first", "c"),
        (with_kernel(1, writes=()), "allocates 'u', without writing it", "second", "u"),
        (
            with_kernel(0, writes=("v",), allocates=("v",)),
            "which is a view: name the owner of the memory, 't'",
            "first",
            "v",
        ),
        (
            with_kernel(2, reads=("u",), writes=("y", "t", "v"), parts=("v",)),
            "writes a part of 'v', and the whole too",
            "third",
            "v",
        ),
        (with_kernel(2, allocates=("s",)), "allocates 's', which has role state", "third", "s"),
        (with_kernel(1, allocates=("u", "u")), "allocates a buffer twice", "second", None),
        (with_kernel(2, writes=("y", "t"), allocates=("t",)), "'t', which an earlier kernel writes", "third", "t"),
    ],
)
def test_a_bad_graph_is_refused_by_name(graph, message, kernel, buffer):
    with pytest.raises(GraphError, match=message) as caught:
        validate_graph(graph)
    assert caught.value.kernel == kernel
    if buffer is not None:
        assert caught.value.buffer == buffer
    with pytest.raises(GraphError):  # a plan is as good as its graph
        validate_plan(Plan(graph, ()))


LAUNCHES = (Launch(0, 0), Launch(1, 0), Launch(2, 0))


@pytest.mark.parametrize(
    ("steps", "message", "step", "buffer"),
    [
        ((*LAUNCHES, Launch(3, 0)), r"step 3 \(s0 launch 3\) launches unknown kernel 3: graph 'good' has 3", 3, None),
        ((*LAUNCHES, Launch(-1, 0)), "launches unknown kernel -1", 3, None),
        ((*LAUNCHES, Launch(1, 0)), r"\(s0 launch 1 second\) launches the kernel again, after step 1", 3, None),
        (LAUNCHES[:1], r"kernel 1 'second' is never launched \(2 such in all\)", None, None),
        ((*LAUNCHES, Record(0, 2)), "is on stream 2, but the plan's streams are 0 to 1", 3, None),
        ((*LAUNCHES, Record(0, -1)), "is on stream -1", 3, None),
        ((Wait(0, 1), Record(0, 0)), "waits for an event that no earlier step records", 0, None),
        ((Record(0, 0), Record(0, 1)), "records the event again, after step 0", 1, None),
        ((Allocate("z", 0),), "names unknown buffer 'z'", 0, "z"),
        ((Free("z", 0),), "names unknown buffer 'z'", 0, "z"),
        ((Allocate("v", 0),), "names a view: name the owner of the memory, 't'", 0, "v"),
        ((Allocate("x", 0),), "allocates a buffer of role input", 0, "x"),
        ((Allocate("c", 0),), "allocates a buffer of role constant", 0, "c"),
        ((Allocate("u", 0),), "allocates a buffer that kernel 1 'second' allocates itself", 0, "u"),
        ((Free("y", 0),), "frees a buffer of role output", 0, "y"),
        ((Free("s", 0),), "frees a buffer of role state", 0, "s"),
    ],
)
def test_a_bad_plan_is_refused_by_name(steps, message, step, buffer):
    with pytest.raises(PlanError, match=message) as caught:
        validate_plan(Plan(GRAPH, steps, 2))
    assert caught.value.step == step
    assert caught.value.buffer == buffer
    if "kernel" in message and "unknown" not in message and buffer is None:
        assert caught.value.kernel == "second"


def test_a_plan_needs_a_stream():
    with pytest.raises(PlanError, match="0 streams"):
        validate_plan(Plan(GRAPH, (), 0))


def test_an_input_may_be_returned_and_updated():
    buffers = (Buffer("x", 8, "cpu", Role.INPUT),)
    kernel = Kernel(0, "add_", KernelKind.FUSED, "cpu", ("x",), ("x",))
    validate_graph(replace(GRAPH, kernels=(kernel,), buffers=buffers, inputs=("x",), outputs=("x", "x")))
