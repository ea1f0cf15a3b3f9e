import pytest

from millstream.cost import (
    CPU,
    H200,
    Costs,
    CostTable,
    DeviceLimits,
    KernelCost,
    MeasuredCosts,
    Roofline,
    format_table,
    kernel_key,
    parse_table,
)
from millstream.errors import ArgumentError
from millstream.graph import Kernel, KernelGraph, KernelKind, parse_graph

GRAPH = parse_graph("""
graph g
inputs   (x)
outputs  (y)
buffers
  x  input      cuda:0  4000
  t  temporary  cuda:0  4000
  u  temporary  cpu     4000
  y  output     cuda:0  8
kernels
  0  fused  tiny  cuda:0  (x) -> (t)       bytes 8000  flops 1000
  1  fused  read  cuda:0  (t) -> (u)       bytes 42600000
  2  gemm   mm    cuda:0  (u) -> (y)       bytes 4260000  flops 79000000000
  3  fused  host  cpu     (u) -> (y)       bytes 1000000
""")
LIMITS = DeviceLimits(bytes_per_s=1e9, matrix_flops_per_s=1e12, vector_flops_per_s=1e9, launch_ns=100, wait_ns=7)


def test_a_kernel_is_as_slow_as_its_launch_its_traffic_or_its_arithmetic():
    tiny, read, product, host = Roofline().estimate(GRAPH).kernels
    assert tiny.duration_ns == H200.launch_ns
    assert tiny.memory_share == pytest.approx(8000 / 4.26e12 / 840e-9)
    assert (read.duration_ns, read.memory_share, read.compute_share) == (10_000, 1.0, 0.0)
    assert (product.duration_ns, product.compute_share) == (100_000, 1.0)
    assert product.memory_share == pytest.approx(0.01)
    assert host.duration_ns == 100_000  # on the CPU


def test_a_wait_costs_what_the_slowest_device_takes():
    assert Roofline().estimate(GRAPH).wait_ns == CPU.wait_ns
    assert Roofline(LIMITS).estimate(GRAPH).wait_ns == 7


def test_limits_can_be_given():
    assert Roofline(LIMITS).estimate(GRAPH).kernels[0] == KernelCost(8000, 1 / 8, 1.0)


def test_the_total_is_the_time_on_one_stream():
    assert Costs((KernelCost(3), KernelCost(4))).total_ns == 7


def test_a_table_reads_back_and_is_sorted():
    table = CostTable("H200", {"torch": "2.11", "a": "1"}, {"k2": KernelCost(5, 0.5, 0.25), "k1": KernelCost(3)})
    assert parse_table(format_table(table)) == table
    swapped = CostTable("H200", {"a": "1", "torch": "2.11"}, {"k1": KernelCost(3), "k2": KernelCost(5, 0.5, 0.25)})
    assert format_table(swapped) == format_table(table)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "kernels": {"k": [1]}}', "\0", "[" * 100_000]
)
def test_what_is_no_table_is_refused(text):
    with pytest.raises(ArgumentError, match=r"not a cost table .*: measure again"):
        parse_table(text)


@pytest.mark.parametrize(
    "cost",
    ["-1, 1, 1", "1e300, 1, 1", "9007199254740992, 1, 1", "5, NaN, 1", "5, 1, Infinity", "5, -3, 1", "5, 1, 1.5"],
)
def test_what_no_kernel_can_cost_is_refused(cost):
    text = format_table(CostTable("H200", {}, {"k": KernelCost(77, 1.0, 1.0)}))
    assert parse_table(text).costs == {"k": KernelCost(77, 1.0, 1.0)}
    text = f'{{"format": 1, "device": "H200", "versions": {{}}, "kernels": {{"k": [{cost}]}}}}'
    with pytest.raises(ArgumentError, match=r"not a cost table .*: measure again"):
        parse_table(text)


def test_a_table_of_another_format_is_refused():
    text = format_table(CostTable("H200")).replace('"format": 1', '"format": 2')
    with pytest.raises(ArgumentError, match="format 2, expected 1: measure again"):
        parse_table(text)


def test_a_table_fits_one_device_and_its_versions():
    table = CostTable("H200", {"torch": "2.11"})
    assert table.fits("H200", {"torch": "2.11"})
    assert not table.fits("H100", {"torch": "2.11"})
    assert not table.fits("H200", {"torch": "2.12"})
    assert not table.fits("H200", {})


def test_new_measurements_take_the_place_of_old_ones():
    table = CostTable("H200", {}, {"a": KernelCost(1), "b": KernelCost(2)})
    assert table.with_costs({"b": KernelCost(3)}).costs == {"a": KernelCost(1), "b": KernelCost(3)}
    assert table.costs["b"] == KernelCost(2)


def test_keys_tell_work_and_sizes_apart_but_not_names_of_buffers():
    keys = {kernel_key(GRAPH, kernel) for kernel in GRAPH.kernels}
    assert len(keys) == len(GRAPH.kernels)
    renamed = parse_graph("""
graph other
inputs   (a)
outputs  (b)
buffers
  a  input   cuda:0  4000
  b  output  cuda:0  4000
kernels
  0  fused  tiny   cuda:0  (a) -> (b)  bytes 8000  flops 1000
  1  fused  tiny2  cuda:0  (a) -> (b)  bytes 8000  flops 1000
""")
    tiny, other = renamed.kernels
    assert kernel_key(renamed, tiny) == kernel_key(GRAPH, GRAPH.kernels[0])
    assert kernel_key(renamed, tiny) != kernel_key(renamed, other)
    assert kernel_key(renamed, tiny, "code") == kernel_key(renamed, other, "code")
    assert kernel_key(renamed, tiny, "code") != kernel_key(renamed, tiny, "other code")


def test_measured_costs_take_the_place_of_calculated_ones():
    table = CostTable("H200", {}, {kernel_key(GRAPH, GRAPH.kernels[1]): KernelCost(77, 0.1, 0.2)})
    model = MeasuredCosts(table, Roofline(LIMITS))
    costs, calculated = model.estimate(GRAPH), Roofline(LIMITS).estimate(GRAPH)
    assert costs.kernels == (calculated.kernels[0], KernelCost(77, 0.1, 0.2), *calculated.kernels[2:])
    assert costs.wait_ns == 7
    assert [kernel.id for kernel in model.missing(GRAPH)] == [0, 2, 3]
    by_code = MeasuredCosts(CostTable("H200"), Roofline(), code_of=lambda kernel: "code")
    assert by_code.key(GRAPH, GRAPH.kernels[0]) == kernel_key(GRAPH, GRAPH.kernels[0], "code")


def test_a_kernel_that_does_nothing_takes_no_time_to_speak_of():
    graph = KernelGraph("idle", (Kernel(0, "nothing", KernelKind.LIBRARY, "cpu", (), ()),), (), ())
    (cost,) = Roofline(DeviceLimits(1e9, 1e9, 1e9, launch_ns=0, wait_ns=0)).estimate(graph).kernels
    assert cost == KernelCost(1, 0.0, 0.0)
