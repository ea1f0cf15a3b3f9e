"""On a GPU: sizes that change are compiled once; results are those of eager at each, new or replayed."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import millstream as ms
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _counted():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.FallbackWarning)
        yield


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))


def images():
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


CASES = {
    "rows": (mlp, [(rows, 64) for rows in (8, 5, 13, 32, 5, 100, 7)]),
    "images": (images, [(rows, 3, size, size) for size in (32, 48, 40) for rows in (4, 2, 7)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_eager_at_every_size(case, dtype):
    torch.manual_seed(0)
    make, shapes = CASES[case]
    model = make().cuda().to(dtype).eval()
    compiled = ms.compile(model)
    with torch.no_grad():
        for _ in range(3):  # new, planned, replayed
            for shape in shapes:
                x = torch.randn(shape, device="cuda", dtype=dtype)
                networks.assert_close(compiled(x), model(x), 1e-3 if dtype is torch.float32 else 2e-2)
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_eager_at_every_size(case):
    torch.manual_seed(0)
    make, shapes = CASES[case]
    model = make().cuda()
    compiled = ms.compile(model)
    for _ in range(2):
        for shape in shapes:
            x = torch.randn(shape, device="cuda")
            ours, theirs = (
                torch.autograd.grad(call(x).square().mean(), list(model.parameters())) for call in (compiled, model)
            )
            networks.assert_close(ours, theirs, 1e-3)
