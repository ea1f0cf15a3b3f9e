from millstream.check import check_plan
from millstream.graph import Allocate, Free, Launch, parse_graph, parse_plan
from millstream.schedule import derive_lifetimes, peak_bytes, plan_serial
from millstream.testing import chain_graph, towers_graph

GRAPH_TEXT = """
graph mixed
inputs   (x, s)
outputs  (y, z, x)
buffers
  x  input      cuda:0  100
  s  state      cuda:0  100
  c  constant   cpu     100
  t  temporary  cuda:0  1000
  v  temporary  cuda:0  1000  view of t
  u  temporary  cuda:0  300
  w  temporary  cpu     50
  y  output     cuda:0  20
  z  output     cuda:0  7
kernels
  0  fused    first   cuda:0  (x, c) -> (t)
  1  library  second  cuda:0  (v) -> (u, z)  allocates (u, z)
  2  fused    unused  cpu     () -> (w)
  3  fused    third   cuda:0  (u, v) -> (y, s)
"""
GRAPH = parse_graph(GRAPH_TEXT)


def test_each_buffer_lives_from_its_first_write_to_its_last_use():
    steps = """
    plan serial on 1 stream
    steps
      s0  allocate  t
      s0  launch    0
      s0  launch    1
      s0  allocate  w
      s0  launch    2
      s0  free      w
      s0  allocate  y
      s0  launch    3
      s0  free      u
      s0  free      t
    """
    expected = parse_plan("\n".join(line[4:] for line in steps.split("\n")) + GRAPH_TEXT)
    assert plan_serial(GRAPH) == expected
    check_plan(expected)


def test_what_existed_before_is_neither_allocated_nor_freed():
    named = {step.buffer for step in plan_serial(GRAPH).steps if isinstance(step, (Allocate, Free))}
    assert not named & {"x", "s", "c"}


def test_an_empty_graph_has_an_empty_plan():
    graph = parse_graph("graph empty\ninputs ()\noutputs ()\nbuffers\nkernels")
    assert plan_serial(graph).steps == ()
    assert peak_bytes(plan_serial(graph)) == 0


def test_lifetimes():
    plan = plan_serial(GRAPH)
    lifetimes = derive_lifetimes(plan)
    assert list(lifetimes) == ["t", "u", "z", "w", "y"]
    assert plan.steps[lifetimes["t"].first] == Launch(0, 0)
    assert plan.steps[lifetimes["t"].last] == Launch(3, 0)
    assert lifetimes["t"].reusable_from == (lifetimes["t"].last + 1,)
    assert lifetimes["t"].overlaps(lifetimes["w"])
    assert lifetimes["w"].overlaps(lifetimes["t"])
    assert not lifetimes["w"].overlaps(lifetimes["y"])
    assert not lifetimes["y"].overlaps(lifetimes["w"])


def test_peak_memory_is_known_before_running():
    plan = plan_serial(GRAPH)
    assert peak_bytes(plan) == 1000 + 300 + 7 + 50
    assert peak_bytes(plan, "cuda:0") == 1000 + 300 + 7 + 20
    assert peak_bytes(plan, "cpu") == 50
    assert peak_bytes(plan_serial(chain_graph(10, num_bytes=8))) == 16
    assert peak_bytes(plan_serial(towers_graph(3, 4, num_bytes=8))) == 3 * 8 + 8


def test_ten_thousand_kernels_in_a_row():
    plan = plan_serial(chain_graph(10_000, num_bytes=8))
    check_plan(plan)
    assert peak_bytes(plan) == 16
