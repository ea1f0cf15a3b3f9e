"""Kernels spread over the multiprocessors of the device itself."""

from dataclasses import replace

import pytest
import torch

import millstream as ms
from millstream.api import executables
from millstream.device import Place, context
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.cuda_graphs.occupancy import load_driver, read_kernels
from millstream.device.cuda_graphs.spread import code_name, spread_kernels
from millstream.graph import Spread
from millstream.kernels.registry import is_generated

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spread", [Spread.APART, Spread.EVEN])
def test_a_graph_of_small_and_large_kernels_computes_the_same(spread):
    place = Place.of("cuda")
    device, small = context(place), torch.randn(300, device="cuda")
    large, right = torch.randn(1 << 22, device="cuda"), torch.randn(64, 64, device="cuda")
    expected = [small * 2, large * 2, right @ right, small.cumsum(0)]  # before, since libraries warm up
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with device.graphs.lock, capture(device, graph):
        results = [small * 2, large * 2, right @ right, small.cumsum(0)]
    before = [params.shared_bytes for _, params, _ in read_kernels(load_driver(), graph)]
    changed = spread_kernels(graph, device.torch_device, spread, lambda name: True)
    after = [params.shared_bytes for _, params, _ in read_kernels(load_driver(), graph)]
    assert 3 <= changed == sum(a != b for a, b in zip(after, before, strict=True))
    assert all(a >= b for a, b in zip(after, before, strict=True))
    # To be apart, a large kernel asks for nothing; to be even, each asks for its share.
    assert spread is Spread.EVEN or changed < len(before)
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("spread", [Spread.APART, Spread.EVEN])
def test_kernels_of_libraries_stay_as_they_are(spread):
    """One of cuDNN's that computes gradients of weights failed on the device when it was given more."""
    device, generator = context(Place.of("cuda")), torch.Generator("cuda").manual_seed(0)

    def normal(*size):
        whole = torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)
        return whole.to(memory_format=torch.channels_last)

    gradient, image, weight = normal(8, 64, 56, 56), normal(8, 64, 56, 56), normal(64, 64, 3, 3)

    def run():
        return torch.ops.aten.convolution_backward(
            gradient, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )[:2]

    expected, graph = run(), torch.cuda.CUDAGraph(keep_graph=True)
    with device.graphs.lock, capture(device, graph):
        results = run()
    assert spread_kernels(graph, device.torch_device, spread, is_generated) == 0
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@torch.no_grad()
@pytest.mark.own_kernels
@pytest.mark.parametrize("spread", [Spread.APART, Spread.EVEN])
def test_kernels_that_are_generated_are_known_by_their_names(spread):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (torch.nn.Conv2d(64, 64, 3, padding=1, groups=groups) for groups in (1, 64))

        def forward(self, image):
            return torch.softmax(self.left(image).relu(), 1) + self.right(image)

    network, image = Branches().cuda().half().eval(), torch.randn(1, 64, 14, 14, device="cuda").half()
    compiled = ms.compile(network, strict=True, streams=2)
    for _ in range(3):
        expected = compiled(image)
    (executable,) = executables(compiled)
    captured = executable.capture_beside(replace(executable.plan, spread=spread))
    asked: dict[str, int] = {}
    for _, params, function in read_kernels(load_driver(), captured.graph):
        asked[code_name(load_driver(), function)] = params.shared_bytes
    assert any(name.startswith("triton_") for name in asked)
    assert min(asked["conv2d"], asked["depthwise"]) > 50_000
    assert torch.equal(captured.run(captured.inputs)[0], expected)
