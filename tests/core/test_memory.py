from dataclasses import replace

import pytest

from millstream.check import check_plan, find_overlaps
from millstream.errors import ArgumentError, PlanError
from millstream.graph import Launch, MemoryLayout, Plan, Record, Wait, parse_graph
from millstream.schedule import assign_offsets, plan_serial
from millstream.testing import chain_graph, towers_graph

GRAPH = parse_graph("""
graph gap
inputs   (x)
outputs  (y)
buffers
  x      input      cpu  64
  big    temporary  cpu  256
  left   temporary  cpu  128
  right  temporary  cpu  128
  small  temporary  cpu  1
  none   temporary  cpu  0
  own    temporary  cpu  999
  y      output     cpu  64
kernels
  0  fused    a  cpu  (x) -> (left)
  1  fused    b  cpu  (left) -> (right, none)
  2  fused    c  cpu  (right) -> (small)
  3  library  d  cpu  (small, right, none) -> (own)  allocates (own)
  4  fused    e  cpu  (own) -> (big)
  5  fused    f  cpu  (big) -> (y)
""")


def test_buffers_that_never_live_together_share_their_bytes():
    layout = assign_offsets(plan_serial(GRAPH))
    assert layout == MemoryLayout({"big": 0, "left": 0, "right": 128, "small": 0, "none": 0}, 256, "cpu")


def test_the_smallest_gap_that_fits_is_taken():
    """Freed between buffers that stay: a gap of 192 bytes, then one of 128. The last buffer fits into the second."""
    sizes = {"a": 448, "wide": 192, "b": 160, "narrow": 128, "c": 128, "last": 128}
    buffers = "\n".join(f"  {name}  temporary  cpu  {size}" for name, size in sizes.items())
    kernels = """
      0  fused  make   cpu  () -> (a, wide, b, narrow, c)
      1  fused  use    cpu  (wide, narrow) -> ()
      2  fused  again  cpu  () -> (last)
      3  fused  end    cpu  (a, b, c, last) -> ()
    """
    graph = parse_graph(f"graph g\ninputs ()\noutputs ()\nbuffers\n{buffers}\nkernels{kernels}")
    layout = assign_offsets(plan_serial(graph))
    assert layout.offset_of == {"a": 0, "wide": 448, "b": 640, "narrow": 832, "c": 960, "last": 832}


def test_a_chain_needs_two_buffers():
    layout = assign_offsets(plan_serial(chain_graph(50, num_bytes=1000)))
    assert layout.arena_bytes == 2 * 1024  # 512-byte alignment on a GPU
    assert set(layout.offset_of.values()) == {0, 1024}


def test_towers_on_streams_share_only_behind_a_wait():
    """Two towers side by side need twice the memory, unless the second begins after the first."""
    graph = towers_graph(2, 2, num_bytes=512)
    apart = Plan(graph, (Launch(0, 0), Launch(2, 1), Launch(1, 0), Launch(3, 1)), 2)
    assert assign_offsets(apart).arena_bytes == 1024
    behind = Plan(graph, (Launch(0, 0), Launch(1, 0), Record(0, 0), Wait(0, 1), Launch(2, 1), Launch(3, 1)), 2)
    assert assign_offsets(behind).arena_bytes == 512


def test_each_device_has_its_own_arena():
    moved = replace(GRAPH, buffers=tuple(replace(b, device="cuda:0") if b.id == "right" else b for b in GRAPH.buffers))
    plan = plan_serial(moved)
    assert set(assign_offsets(plan, "cuda:0").offset_of) == {"right"}
    assert assign_offsets(plan, "cuda:0").arena_bytes == 512
    assert set(assign_offsets(plan, "cpu").offset_of) == {"big", "left", "small", "none"}
    with pytest.raises(ArgumentError, match="'gap' live on cpu, cuda:0: name one device"):
        assign_offsets(plan)


def test_a_graph_without_temporaries_has_an_empty_arena():
    assert assign_offsets(plan_serial(chain_graph(1))) == MemoryLayout({}, 0, "cpu")


def test_ten_thousand_buffers_that_never_overlap_share_two_places():
    layout = assign_offsets(plan_serial(chain_graph(10_000)))
    assert len(set(layout.offset_of.values())) == 2


def test_an_overlap_is_found_and_told():
    plan = plan_serial(GRAPH)
    layout = MemoryLayout({"left": 0, "right": 64, "big": 0}, 256, "cpu")
    (overlap,) = find_overlaps(plan, layout)
    assert (overlap.buffer, overlap.other, overlap.start, overlap.end) == ("left", "right", 64, 128)
    assert str(overlap) == (
        "buffers 'left' and 'right' share bytes 64 to 128 of the arena:\n"
        "  step 4 on stream 0: kernel 1 'b' reads it\n"
        "  step 4 on stream 0: kernel 1 'b' writes it"
    )
    with pytest.raises(PlanError, match="not safe to run, 1 fault found"):
        check_plan(plan, layout)
    check_plan(plan, assign_offsets(plan))


@pytest.mark.parametrize(("taken_at", "other_at"), [(2560, 1100), (1536, 3000)])
def test_what_is_left_of_a_buffer_still_has_its_owner(taken_at, other_at):
    """One buffer takes a part of another that is done with; the rest is taken by a stream that does not know that."""
    graph = towers_graph(2, 4)
    steps = (*(Launch(kernel, 0) for kernel in (0, 1, 2, 3)), *(Launch(kernel, 1) for kernel in (4, 5, 6, 7)))
    layout = MemoryLayout({"tower0_0": 2048, "tower0_2": taken_at, "tower1_0": other_at}, 8192, "cuda:0")
    (overlap,) = find_overlaps(Plan(graph, steps, 2), layout)
    assert (overlap.buffer, overlap.other) == ("tower0_0", "tower1_0")
    assert (overlap.start, overlap.end) in [(2048, 2124), (3000, 3072)]


@pytest.mark.parametrize(
    ("offset_of", "message"),
    [
        ({"z": 0}, "unknown buffer 'z'"),
        ({"big": 1}, "'big' at bytes 1 to 257, outside its arena of 256 bytes"),
        ({"left": -64}, "'left' at bytes -64 to 64, outside"),
        ({"y": 0}, "names output 'y': lay out temporaries"),
        ({"x": 0}, "names input 'x': lay out temporaries"),
    ],
)
def test_a_layout_must_fit_its_plan(offset_of, message):
    with pytest.raises(PlanError, match=message):
        find_overlaps(plan_serial(GRAPH), MemoryLayout(offset_of, 256, "cpu"))


def test_a_layout_is_of_the_device_of_its_buffers():
    with pytest.raises(PlanError, match="'left' of cpu on cuda:0"):
        find_overlaps(plan_serial(GRAPH), MemoryLayout({"left": 0}, 512, "cuda:0"))


def test_a_layout_keeps_to_the_alignment():
    plan = plan_serial(GRAPH)
    with pytest.raises(PlanError, match="'right' at byte 129: on cpu take multiples of 64"):
        check_plan(plan, MemoryLayout({"left": 0, "right": 129}, 512, "cpu"))
