"""C++ kernels that work on tiles write within their results. Where they do not, the process may as well die later."""

import pytest
import torch
from torch.nn import functional

import millstream as ms
from tests.networks import assert_close


def fold(x):
    """Sums of patches, which lie in memory in another order than they are summed in."""
    patches = x.permute(0, 1, 4, 3, 2).reshape(x.shape[0], -1, x.shape[2])
    return functional.fold(patches, (28, 28), 3, padding=1, stride=2).permute(0, 2, 3, 1)


def reduce(x):
    """A product that is computed as a sum, over a dimension that is not the one after the first."""
    value = functional.gelu(x)
    left = functional.pad(value, (0, 0, 0, 0, 0, 58), value=0.5)
    return torch.matmul(left, functional.pad(value.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5))


@pytest.mark.parametrize(("function", "size"), [(fold, (1, 6, 196, 9, 32)), (reduce, (1, 8, 66, 66))])
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_right(function, size, threads):
    torch.manual_seed(0)
    x = torch.randn(size)
    x = x.contiguous(memory_format=torch.channels_last) if function is reduce else x
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = ms.compile(function, engine="serial", strict=True, options={"cpp.threads": threads})
        for _ in range(3):
            assert_close(compiled(x), function(x), 1e-5)
