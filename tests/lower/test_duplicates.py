"""What is computed twice is computed once, unless somebody could tell."""

import pytest
import torch
from torch.nn import functional as F

import millstream as ms
from millstream.api import executables
from tests.networks import assert_close


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def compiled(function, *inputs):
    """The function compiled, after a call, and the names of what its kernels are made of."""
    result = ms.compile(function, strict=True, engine="serial")
    result(*inputs)
    (executable,) = executables(result)
    return result, [op for kernel in executable.lowered.program.graph.kernels for op in kernel.ops]


def test_a_product_of_the_same_is_computed_once():
    def function(x, weight):
        return torch.relu(x) @ weight + 1, (torch.relu(x) @ weight).sin()

    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    run, ops = compiled(function, x, weight)
    assert ops.count("mm") == 1
    assert_close(run(x, weight), function(x, weight))


def test_results_stay_tensors_of_their_own():
    def function(x):
        return torch.exp(x), torch.exp(x)

    x = torch.randn(5)
    run, _ = compiled(function, x)
    first, second = run(x)
    first.zero_()
    assert_close(second, torch.exp(x))


def test_other_numbers_are_another_thing():
    def function(x):
        return torch.full_like(x, 1) / 2 + x * 2, torch.full_like(x, 1.0) / 2.0 + x * 2.0, x.double() * 2, x * 2

    x = torch.randint(9, (6,), dtype=torch.int32)
    run, _ = compiled(function, x)
    results, wanted = run(x), function(x)
    assert [each.dtype for each in results] == [each.dtype for each in wanted]
    assert_close(results, wanted)


def test_what_was_read_before_it_changed_is_not_what_it_is_now():
    def function(x, y):
        before = torch.sin(y) @ x
        y.mul_(2)
        return before, torch.sin(y) @ x

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    run, _ = compiled(function, x, y.clone())
    ours, theirs = y.clone(), y.clone()
    assert_close((run(x, ours), ours), (function(x, theirs), theirs))


def test_random_numbers_are_drawn_anew():
    def function(x):
        return F.dropout(x, 0.5, True), F.dropout(x, 0.5, True), torch.rand(64), torch.rand(64)

    x = torch.ones(64)
    run, _ = compiled(function, x)
    first, second, third, fourth = run(x)
    assert not torch.equal(first, second)
    assert not torch.equal(third, fourth)
