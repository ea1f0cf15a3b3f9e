"""Memory packed by expected times, and kernels put off until they are needed, on graphs small enough to follow."""

import pytest

from millstream.check import check_plan
from millstream.cost import Costs, KernelCost
from millstream.errors import PlanError
from millstream.graph import MemoryLayout, Plan, Wait, derive_dependencies, format_plan, parse_graph, parse_plan
from millstream.schedule import assign_list, place_allocations, place_waits, plan_graph
from millstream.schedule.assignment import Assignment
from millstream.schedule.delay import delay_kernels, sources
from millstream.schedule.memory.reuse import share_memory
from millstream.testing import drop_step, towers_graph

WAIT_NS = 10


def predecessors_of(graph):
    return [[found.kernel for found in each] for each in derive_dependencies(graph)]


def assign(graph, stream_of, start_ns, durations_ns):
    assignment = Assignment(tuple(stream_of), tuple(start_ns), max(map(sum, zip(start_ns, durations_ns, strict=True))))
    return share_memory(graph, assignment, durations_ns, WAIT_NS)


@pytest.mark.parametrize(("begin", "shared"), [(209, False), (210, True)])
def test_memory_passes_to_another_stream_once_a_wait_costs_nothing(begin, shared):
    """Two towers of two kernels; the second may begin when the first's only temporary is over, and a wait later."""
    graph = towers_graph(2, 2, num_bytes=512)
    layout, waits = assign(graph, (0, 0, 1, 1), (0, 100, begin, begin + 100), (100,) * 4)
    assert layout.arena_bytes == (512 if shared else 1024)
    assert waits == ({2: {1}} if shared else {})


def test_on_the_same_stream_memory_passes_at_once():
    graph = towers_graph(2, 2, num_bytes=512)
    layout, waits = assign(graph, (0,) * 4, (0, 100, 200, 300), (100,) * 4)
    assert layout == MemoryLayout({"tower0_0": 0, "tower1_0": 0}, 512, "cuda:0")
    assert waits == {2: {1}}  # implied by the stream, so that no wait comes of it


FORK = parse_graph("""
graph fork
inputs   ()
outputs  (y, z, u)
buffers
  t  temporary  cpu  64
  v  temporary  cpu  64
  y  output     cpu  64
  z  output     cpu  64
  u  output     cpu  64
kernels
  0  fused  make   cpu  () -> (t)
  1  fused  left   cpu  (t) -> (y)
  2  fused  right  cpu  (t) -> (z)
  3  fused  again  cpu  () -> (v)
  4  fused  end    cpu  (v) -> (u)
""")


def test_what_takes_memory_waits_for_the_last_use_on_every_stream():
    layout, waits = assign(FORK, (0, 0, 1, 2, 2), (0, 100, 110, 220, 320), (100,) * 5)
    assert layout == MemoryLayout({"t": 0, "v": 0}, 64, "cpu")
    assert waits == {3: {1, 2}}


def test_kernels_that_take_no_time_are_told_apart():
    """All at one time: nothing is over before anything else, and no kernel waits for one that is launched later."""
    graph = towers_graph(3, 2, num_bytes=512)
    layout, waits = assign(graph, (0, 1, 1, 0, 2, 2), (0,) * 6, (0,) * 6)
    assert layout.arena_bytes == 3 * 512
    assert not waits


OPERATOR = """
graph operator
inputs   ()
outputs  (y)
buffers
  own  temporary  cuda:0  64
  t    temporary  cuda:0  64
  y    output     cuda:0  64
kernels
  0  library  a  cuda:0  () -> (own)  allocates (own)
  1  fused    b  cuda:0  (own) -> (t)
  2  fused    c  cuda:0  (t) -> (y)
"""


def test_what_operators_allocate_is_left_alone():
    layout, _ = assign(parse_graph(OPERATOR), (0,) * 3, (0, 1, 2), (1,) * 3)
    assert set(layout.offset_of) == {"t"}


def test_temporaries_of_two_devices_are_not_packed():
    text = OPERATOR.replace("  allocates (own)", "").replace("t    temporary  cuda:0", "t    temporary  cpu")
    assert assign(parse_graph(text), (0,) * 3, (0, 1, 2), (1,) * 3) == (None, {})


def test_dropping_the_wait_behind_which_memory_is_used_again_is_found():
    graph = towers_graph(2, 2, num_bytes=512)
    layout, more = assign(graph, (0, 0, 1, 1), (0, 100, 210, 310), (100,) * 4)
    predecessors = [[*each, *more.get(kernel, ())] for kernel, each in enumerate(predecessors_of(graph))]
    steps = place_waits(range(4), (0, 0, 1, 1), predecessors, 2)
    plan = place_allocations(Plan(graph, tuple(steps), 2, layout=layout))
    check_plan(plan)
    position = plan.steps.index(Wait(0, 1))
    with pytest.raises(PlanError, match="'tower0_0' and 'tower1_0' share bytes 0 to 512"):
        check_plan(drop_step(plan, position))


def test_a_plan_with_an_arena_reads_back_and_its_faults_are_told():
    plan = plan_graph(towers_graph(2, 2), Costs((KernelCost(9),) * 4), 2, packed=True)
    text = format_plan(plan)
    assert "arena 2048 cuda:0\n  tower0_0  0\n  tower1_0  1024\n" in text
    assert parse_plan(text) == plan
    with pytest.raises(PlanError, match="outside its arena"):
        check_plan(parse_plan(text.replace("arena ", "arena -")))


COPIES = parse_graph("""
graph copies
inputs   (x, w)
outputs  (y)
buffers
  x  input      cuda:0  64
  w  state      cuda:0  64
  c  temporary  cuda:0  64
  a  temporary  cuda:0  64
  b  temporary  cuda:0  64
  y  output     cuda:0  64
kernels
  0  copy   weight  cuda:0  (w) -> (c)
  1  fused  first   cuda:0  (x) -> (a)
  2  fused  second  cuda:0  (a) -> (b)
  3  gemm   third   cuda:0  (b, c) -> (y)
""")


def test_copies_of_weights_are_made_late():
    """So late that there is still time for the wait that it takes and eight more."""
    durations = (5, 1000, 1000, 1000)
    before = assign_list(predecessors_of(COPIES), durations, WAIT_NS, 2)
    assert before.start_ns[0] == 0
    assert sources(COPIES) == [0, 1]
    after = delay_kernels(before, predecessors_of(COPIES), durations, WAIT_NS, [0])
    assert after.start_ns == (2000 - 9 * WAIT_NS - 5, 0, 1000, 2000)
    assert after.stream_of[0] != after.stream_of[3]  # kernel 2 is in the way there
    assert after.end_ns == before.end_ns


def test_a_kernel_put_off_leaves_room_for_the_wait_for_its_predecessor():
    """Its own stream has no gap later on; on the other one it would begin at 104, and a wait costs 10."""
    predecessors = [[], [0], [], [1]]
    for end, place in ((100, (100, 1)), (90, (104, 0))):
        durations = (end, 1, 94, 5)
        before = Assignment((1, 1, 1, 0), (0, 100, 101, 195), 200)
        after = delay_kernels(before, predecessors, durations, WAIT_NS, [1])
        assert (after.start_ns[1], after.stream_of[1]) == place


def test_ten_thousand_kernels_are_packed():
    graph = towers_graph(20, 500)
    costs = Costs((KernelCost(1000),) * 10_000, 1500)
    check_plan(plan_graph(graph, costs, 8, packed=True))
