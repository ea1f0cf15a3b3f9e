"""What is compiled runs as plain Python within a transform of ``torch.func`` or forward-mode differentiation."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import millstream as ms
from millstream.api import dynamo_backend

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own forward mode


def forward_mode(f, x):
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos())))


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jacrev of vmap": lambda f, x: torch.func.jacrev(torch.func.vmap(f))(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "forward mode": forward_mode,
}


def in_regions(model):
    @ms.step
    def step(x):
        hidden = model(x)
        with ms.eager_region():
            half = hidden * 0.5
        return half * 2

    return step


WAYS = {
    "compile": ms.compile,
    "backend": lambda model: torch.compile(model, backend=dynamo_backend),
    "step": lambda model: ms.step(lambda x: model(x)),
    "regions": in_regions,
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_of_what_is_compiled_are_right(way):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    call = WAYS[way](model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ms.FallbackWarning)
        for transform in TRANSFORMS.values():
            torch.testing.assert_close(transform(call, x), transform(model, x))
            with torch.no_grad():
                torch.testing.assert_close(call(x), model(x))
    reasons = [str(each.message) for each in told if each.category is ms.FallbackWarning]
    assert all("within a transform such as torch.func.grad" in reason for reason in reasons), reasons
    assert len(reasons) == 1 or way == "backend"  # which each graph has anew, and where torch.compile compiles at all


def test_strictly_captured_within_a_transform_is_refused():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    for call in (ms.compile(model, strict=True), ms.step(lambda x: model(x), strict=True)):
        for transform in (TRANSFORMS["grad"], forward_mode):
            with pytest.raises(ms.CaptureError, match="within a transform"):
                transform(call, x)
