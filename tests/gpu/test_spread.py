"""Small kernels kept apart on the device itself."""

import pytest
import torch

from millstream.device import Place, context
from millstream.device.graphs import capture
from millstream.device.occupancy import load_driver, read_kernels
from millstream.device.spread import spread_kernels
from millstream.graph import Spread

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spread", [Spread.APART, Spread.EVEN])
def test_a_graph_of_small_and_large_kernels_computes_the_same(spread):
    place = Place.of("cuda")
    device, small = context(place), torch.randn(300, device="cuda")
    large, right = torch.randn(1 << 22, device="cuda"), torch.randn(64, 64, device="cuda")
    expected = [small * 2, large * 2, right @ right, small.cumsum(0)]  # before, since libraries warm up
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with device.graph_lock, capture(device, graph):
        results = [small * 2, large * 2, right @ right, small.cumsum(0)]
    before = [params.shared_bytes for _, params, _ in read_kernels(load_driver(), graph)]
    changed = spread_kernels(graph, device.torch_device, spread)
    after = [params.shared_bytes for _, params, _ in read_kernels(load_driver(), graph)]
    assert 3 <= changed == sum(a != b for a, b in zip(after, before, strict=True))
    assert all(a >= b for a, b in zip(after, before, strict=True))
    # To be apart, a large kernel asks for nothing; to be even, each asks for its share.
    assert spread is Spread.EVEN or changed < len(before)
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
