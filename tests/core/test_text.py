from dataclasses import replace

import pytest

from millstream.errors import GraphError
from millstream.graph import (
    Allocate,
    Buffer,
    Free,
    Kernel,
    KernelGraph,
    KernelKind,
    Launch,
    MemoryLayout,
    ParseError,
    Plan,
    Record,
    Role,
    Spread,
    Wait,
    format_graph,
    format_plan,
    format_step,
    parse_graph,
    parse_plan,
)

GRAPH_TEXT = """\
graph "two layers"
inputs   (x, w)
outputs  (y)
buffers
  x  input      cuda:0  4096
  w  state      cuda:0  65536
  t  temporary  cuda:0  4096
  v  temporary  cuda:0  4096  view of t
  y  output     cuda:0  4096
kernels
  0  gemm   mm.out            cuda:0  (x, w) -> (t)  bytes 73728  flops 2097152  from "model.py:7 in forward"
  1  fused  triton_gelu_relu  cuda:0  (v) -> (y)  allocates (y)  bytes 8192  ops (gelu, relu)
"""

GRAPH = KernelGraph(
    "two layers",
    (
        Kernel(
            0, "mm.out", KernelKind.GEMM, "cuda:0", ("x", "w"), ("t",), (), 73728, 2097152, (), "model.py:7 in forward"
        ),
        Kernel(1, "triton_gelu_relu", KernelKind.FUSED, "cuda:0", ("v",), ("y",), ("y",), 8192, 0, ("gelu", "relu")),
    ),
    (
        Buffer("x", 4096, "cuda:0", Role.INPUT),
        Buffer("w", 65536, "cuda:0", Role.STATE),
        Buffer("t", 4096, "cuda:0", Role.TEMPORARY),
        Buffer("v", 4096, "cuda:0", Role.TEMPORARY, "t"),
        Buffer("y", 4096, "cuda:0", Role.OUTPUT),
    ),
    ("x", "w"),
    ("y",),
)

PLAN_TEXT = """\
plan list on 2 streams
steps
  s0  allocate  t
  s0  launch    0 mm.out
  s0  record    e0
  s1  wait      e0
  s0  launch    1 triton_gelu_relu
  s0  free      t
"""

PLAN = Plan(
    GRAPH,
    (Allocate("t", 0), Launch(0, 0), Record(0, 0), Wait(0, 1), Launch(1, 0), Free("t", 0)),
    2,
    "list",
)


def test_a_graph_reads_well_and_reads_back():
    assert format_graph(GRAPH) == GRAPH_TEXT
    assert parse_graph(GRAPH_TEXT) == GRAPH


def test_a_plan_reads_well_and_reads_back():
    assert format_plan(PLAN) == PLAN_TEXT + GRAPH_TEXT
    assert parse_plan(PLAN_TEXT + GRAPH_TEXT) == PLAN
    assert format_plan(Plan(GRAPH, ())).startswith("plan serial on 1 stream\n")


def test_a_step_on_one_line():
    assert format_step(GRAPH, Launch(1, 3)) == "s3 launch 1 triton_gelu_relu"


STRANGE_NAMES = (
    *("", " ", "a b", "a, b", "(a)", "->", "a->b", "-a", "a-b", "#a", "7", "0x1f", "s0", "e0", "view", "of", "kernels"),
    *('"', "\\", "\\x41", "\n", "\t", "\0", "\r\x85\u2028", "é", "日本", "a\u0301", "\ud83d\ude00", "😀", "\U0010ffff"),
)


@pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
def test_any_name_reads_back(name):
    kernel = Kernel(0, name, KernelKind.COPY, name, (name, name), (name,), (name,), 1, 2, (name,), name, module=name)
    graph = KernelGraph(name, (kernel,), (Buffer(name, 1, name, Role.INPUT, name),), (name,), (name,))
    plan = Plan(graph, (Launch(0, 0), Allocate(name, 0), Free(name, 0)), 1, name)
    assert parse_graph(format_graph(graph)) == graph
    assert parse_plan(format_plan(plan)) == plan
    assert format_graph(graph).replace("\n", "").isprintable()


def test_invalid_plans_read_back_too():
    plan = Plan(GRAPH, (Launch(-1, -2), Launch(9, 5), Wait(-3, 0), Free("?", 0)), 0)
    assert parse_plan(format_plan(plan)) == plan


def test_spacing_comments_and_left_out_names_do_not_matter():
    loose = GRAPH_TEXT.replace("  ", "\t ").replace("kernels\n", "\n# what runs\nkernels \n  # first\n")
    assert parse_graph(loose) == GRAPH
    assert parse_plan(PLAN_TEXT.replace("launch    0 mm.out", "launch 0") + GRAPH_TEXT) == PLAN


@pytest.mark.parametrize("spread", [Spread.APART, Spread.EVEN])
def test_a_spread_plan_reads_back(spread):
    head, rest = PLAN_TEXT.split("\n", 1)
    text = f"{head} {spread.value}\n{rest}{GRAPH_TEXT}"
    assert format_plan(replace(PLAN, spread=spread)) == text
    assert parse_plan(text) == replace(PLAN, spread=spread)
    with pytest.raises(ParseError, match=r"line 1, .*: expected 'packed' or 'apart' or 'even', found wide"):
        parse_plan(text.replace(spread.value, "wide", 1))


ARENA_TEXT = 'arena 8192 cuda:0\n  t      4096\n  "a b"  0\n'


def test_an_arena_reads_back():
    layout = MemoryLayout({"t": 4096, "a b": 0}, 8192, "cuda:0")
    assert format_plan(replace(PLAN, layout=layout)) == PLAN_TEXT + ARENA_TEXT + GRAPH_TEXT
    assert parse_plan(PLAN_TEXT + ARENA_TEXT + GRAPH_TEXT) == replace(PLAN, layout=layout)
    empty = replace(PLAN, layout=MemoryLayout({}, 0, "cpu"))
    assert parse_plan(format_plan(empty)) == empty


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("8192", "many", "line 9, column 7: expected the size of the arena, found many"),
        (" cuda:0", "", "line 9, column 11: expected the device, found the end of the line"),
        ("4096", "x", "line 10, column 10: expected its offset in the arena, found x"),
        ("0\n", "0 1\n", "expected the end of the line, found 1"),
    ],
)
def test_a_malformed_arena_is_told(old, new, message):
    with pytest.raises(ParseError, match=message):
        parse_plan(PLAN_TEXT + ARENA_TEXT.replace(old, new, 1) + GRAPH_TEXT)


def test_one_very_long_name_does_not_push_the_others_away():
    name = "triton_" + "very_" * 30 + "long"
    kernels = (replace(GRAPH.kernels[0], name=name), GRAPH.kernels[1])
    long_line, other = format_graph(replace(GRAPH, kernels=kernels)).splitlines()[-2:]
    assert len(long_line) > 150 > len(other) + 20


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph ", "graf ", r"line 1, column 1: expected 'graph', found graf"),
        ('"two layers"', "", r"line 1, column 6: expected the graph's name, found the end of the line"),
        ('"two layers"', "two layers", r"line 1, column 11: expected the end of the line, found layers"),
        ('layers"', "layers", r'line 1, column 7: expected a word.* found \'"\''),
        ('layers"', 'layers\\q"', r"line 1, column 7: expected a name that is escaped only by"),
        ('layers"', 'layers\\U00ffffff"', r"line 1, column 7: expected a name that is escaped only by"),
        ("inputs   (x, w)", "inputs   x", r"line 2, column 10: expected the inputs as \(...\), found x"),
        ("(x, w)\nout", "(x w)\nout", r"line 2, column 13: expected ',' or '\)', found w"),
        ("(x, w)\nout", "(x, )\nout", r"line 2, column 14: expected a name or '\)', found \)"),
        ("(x, w)\nout", "(x, w\nout", r"line 2, column 15: expected ',' or '\)', found the end of the line"),
        ("outputs  (y)\n", "", r"line 3, column 1: expected 'outputs', found buffers"),
        ("buffers\n", "  buffers\n", r"line 4, column 3: expected 'buffers' at the beginning of the line"),
        ("input ", "imput ", r"line 5, column 6: expected 'input' or 'state' or .*, found imput"),
        ("65536", "64K", r"line 6, column 25: expected the number of bytes, found 64K"),
        ("view of", "view", r"line 8, column 36: expected 'of', found t"),
        ("view of t", "alias of t", r"line 8, column 31: expected 'view of' or the end of the line"),
        ("-> (t)", "(t)", r"line 11, column 46: expected '->', found \("),
        ("flops 2097152", "flops many", r"line 11, column 73: expected the number of operations"),
        (
            "ops (gelu, relu)",
            "fused (gelu)",
            r"line 12, .*: expected 'allocates', .* or the end of the line, found fused",
        ),
        ("  1  fused", "1  fused", r"line 12, column 1: expected the end of the text, found 1"),
    ],
)
def test_a_bad_graph_text_is_refused_where_it_is_bad(old, new, message):
    assert old in GRAPH_TEXT
    with pytest.raises(ParseError, match=message) as caught:
        parse_graph(GRAPH_TEXT.replace(old, new, 1))
    assert isinstance(caught.value, GraphError)
    place = f"line {caught.value.line}, column {caught.value.column}"
    assert str(caught.value).startswith(f"{place}: expected {caught.value.expected}, found ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2 streams", "two streams", "line 1, column 14: expected the number of streams, found two"),
        ("s0  allocate", "0  allocate", "line 3, column 3: expected a stream such as s0, found 0"),
        ("allocate", "malloc", "line 3, column 7: expected 'launch' or 'record' or .* found malloc"),
        ("mm.out", "addmm", "line 4, column 19: expected mm.out, the name of kernel 0 in the graph below, found addmm"),
        ("record    e0", "record    0", "line 5, column 17: expected an event such as e0, found 0"),
    ],
)
def test_a_bad_plan_text_is_refused_where_it_is_bad(old, new, message):
    with pytest.raises(ParseError, match=message):
        parse_plan(PLAN_TEXT.replace(old, new, 1) + GRAPH_TEXT)


def test_a_text_that_ends_too_early():
    with pytest.raises(ParseError, match="line 9, column 1: expected 'graph', found the end of the text"):
        parse_plan(PLAN_TEXT)
    with pytest.raises(ParseError, match="expected 'graph', found the end of the text"):
        parse_graph("")
