"""Average pooling whose last windows hang over the edge: gradients are eager's."""

import pytest
import torch
import torch.nn.functional as F

import millstream as ms

CASES = [
    pytest.param(lambda x: F.avg_pool1d(x, 3, 2, ceil_mode=True), (2, 6), id="1d"),
    pytest.param(lambda x: F.avg_pool2d(x, (3, 2), 3, (1, 0), ceil_mode=True), (2, 6, 7), id="2d, padded"),
    pytest.param(lambda x: F.avg_pool2d(x, 3, 2, 1, True, count_include_pad=False), (2, 6, 6), id="2d, pads left out"),
    pytest.param(lambda x: F.avg_pool3d(x, 2, ceil_mode=True), (2, 3, 4, 5), id="3d"),
]


@pytest.mark.parametrize(("pool", "size"), CASES)
def test_gradients_are_those_of_eager(pool, size):
    torch.manual_seed(0)
    x = torch.randn(3, *size, requires_grad=True)
    ours, theirs = ms.compile(pool, strict=True)(x), pool(x)
    weights = torch.randn_like(theirs)
    assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(ours, x, weights)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, x, weights)[0])


def test_gradients_within_a_step_are_those_of_eager():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 6, 6), torch.nn.Parameter(torch.randn(3, 1, 1))
    optimizer = torch.optim.SGD([weight], 0.1)

    def step(x):
        pooled = F.avg_pool2d(torch.tanh(x * weight), 3, 2, ceil_mode=True)
        pooled.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured, start, ends = ms.step(step, strict=True), weight.detach().clone(), []
    for run in (captured, captured, step):  # the first call runs eagerly
        with torch.no_grad():
            weight.copy_(start)
        run(x)
        ends.append(weight.detach().clone())
    assert len(captured.graphs) == 1
    torch.testing.assert_close(ends[1], ends[2])
