import pytest

from millstream.graph import Free, Launch, derive_dependencies, parse_graph, step_storages
from millstream.testing import chain_graph, towers_graph

BUFFERS = """
buffers
  x  input      cpu  8
  s  state      cpu  8
  t  temporary  cpu  8
  u  temporary  cpu  8
  v  temporary  cpu  8  view of t
  y  output     cpu  8
kernels
"""


def dependencies(*kernels):
    """Per kernel, written as ``(reads) -> (writes)``: {predecessor: (kind, buffer)}"""
    lines = "\n".join(f"  {number} fused k{number} cpu {effects}" for number, effects in enumerate(kernels))
    graph = parse_graph(f"graph g\ninputs (x, s)\noutputs (y){BUFFERS}{lines}")
    return [{found.kernel: (found.kind, found.buffer) for found in each} for each in derive_dependencies(graph)]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        pytest.param(["(x) -> (t)", "(t) -> (y)"], [{}, {0: ("RAW", "t")}], id="read after write"),
        pytest.param(["(s) -> (t)", "() -> (s)"], [{}, {0: ("WAR", "s")}], id="write after read"),
        pytest.param(["() -> (t)", "() -> (t)"], [{}, {0: ("WAW", "t")}], id="write after write"),
        pytest.param(["(x) -> (t)", "(x) -> (u)"], [{}, {}], id="two reads are no conflict"),
        pytest.param(["(x) -> (v)", "(t) -> (y)"], [{}, {0: ("RAW", "t")}], id="a view is its owner's memory"),
        pytest.param(["(x) -> (t)", "(v, t) -> (v)"], [{}, {0: ("RAW", "t")}], id="an update in place depends once"),
        pytest.param(["(s) -> (t)", "(s, t) -> (s)"], [{}, {0: ("RAW", "t")}], id="RAW hides WAR of the same kernel"),
        pytest.param(
            ["() -> (t)", "(t) -> (u)", "(t) -> (y)", "() -> (t)"],
            [{}, {0: ("RAW", "t")}, {0: ("RAW", "t")}, {1: ("WAR", "t"), 2: ("WAR", "t")}],
            id="readers stand between two writers",
        ),
        pytest.param(
            ["() -> (t)", "() -> (t)", "(t) -> (y)"],
            [{}, {0: ("WAW", "t")}, {1: ("RAW", "t")}],
            id="only the last writer counts",
        ),
    ],
)
def test_dependencies(kernels, expected):
    assert dependencies(*kernels) == expected


def test_towers_depend_only_within_themselves():
    graph = towers_graph(3, 4)
    for kernel, found in zip(graph.kernels, derive_dependencies(graph), strict=True):
        assert [each.kernel for each in found] == ([kernel.id - 1] if kernel.id % 4 else [])


def test_ten_thousand_kernels_in_a_row():
    found = derive_dependencies(chain_graph(10_000))
    assert sum(map(len, found)) == 9_999


def test_what_each_step_touches():
    graph = parse_graph(f"graph g\ninputs (x, s)\noutputs (y){BUFFERS}  0 fused k cpu (x, v, t) -> (v, y)")
    assert step_storages(graph, Launch(0, 0)) == (("x", "t"), ("t", "y"))
    assert step_storages(graph, Free("t", 0)) == ((), ())
