"""The prediction of suite ``parallel`` on more GPUs, and the sweep that a link is fitted to."""

from pathlib import Path

import pytest

from benchmarks.sweeps import collectives, scaling
from millstream.cost import NVLINK, Network, parse_network
from millstream.graph import KernelKind, validate_graph
from millstream.simulate import bucket_bytes

FOUND = list(scaling.predictions(Network(NVLINK)))
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "scaling_prediction.md"


def test_page_is_what_the_script_says():
    assert PAGE.read_text(encoding="utf-8") == scaling.page(FOUND, Network(NVLINK))


@pytest.mark.parametrize("each", FOUND, ids=lambda each: each.case)
def test_a_step_takes_on_one_gpu_what_was_measured(each):
    validate_graph(each.graph)
    expected_ms = scaling.ONE_GPU_MS[each.case][0]
    assert each.whole[0].one_ns == pytest.approx(expected_ms * 1e6, rel=0.02)
    assert all(
        0 < segments.efficiency <= one.efficiency <= 1 for one, segments in zip(each.whole, each.segments, strict=True)
    )
    assert [one.step_ns for one in each.whole] == sorted(one.step_ns for one in each.whole)


def test_buckets_hold_all_gradients():
    graph = next(each for each in FOUND if each.case == "resnet50 b32").graph
    collectives = [kernel for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    sizes = [bucket_bytes(graph, kernel) for kernel in collectives if "bucket" in kernel.name]
    assert sum(sizes) == pytest.approx(25_557_032 * 4, rel=0.001)


@pytest.mark.parametrize("each", scaling.PUBLISHED, ids=lambda each: each.what)
def test_published_figures_lie_between_or_a_little_below(each):
    end, beside = each.predicted()
    assert end - 0.03 <= each.efficiency <= beside


def test_all_reduce_of_a_published_step():
    """3 ms on 64 H100 of 8 hosts, of the gradients of 124 million parameters (modal's nanoGPT)."""
    network = parse_network("nvlink,ib-400")
    assert network.time_ns("all_reduce", 498_000_000, 64) == pytest.approx(3e6, rel=0.25)


def test_a_sweep_is_added_to(tmp_path):
    path = tmp_path / "sweep.json"
    old = [{"devices": 2, "bytes": 1 << power, "ns": 9000 + (1 << power) // 300} for power in (12, 20, 24)]
    collectives.write(path, old, "cpu")
    new = [{"devices": 2, "bytes": 4096, "ns": 7000}, {"devices": 4, "bytes": 4096, "ns": 12_000}]
    content = collectives.write(path, new, "cpu")
    assert content["times"][0]["ns"] == 7000
    assert len(content["times"]) == 4
    assert "GB/s" in collectives.report(content)


@pytest.mark.parametrize(("size", "expected"), [(2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (6, [2, 4, 6])])
def test_sweep_times_powers_of_two_and_all(size, expected):
    assert collectives.counts(size) == expected
