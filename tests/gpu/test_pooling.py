"""On a GPU: gradients of average pooling are right where eager's are not (pytorch#188344, channels_last and padded)."""

import pytest
import torch
import torch.nn.functional as F

import millstream as ms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("arguments", [(3, 1, 1), (2, 2, 0, True)])
def test_gradients_are_those_of_the_host(layout, arguments):
    def pool(x):
        return F.avg_pool2d(x, *arguments)

    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    theirs = pool(x)
    weights = torch.randn_like(theirs)
    (expected,) = torch.autograd.grad(theirs, x, weights)
    image = x.detach().cuda().contiguous(memory_format=layout).requires_grad_()
    ours = ms.compile(pool, strict=True)(image)
    (gradient,) = torch.autograd.grad(ours, image, weights.cuda())
    torch.testing.assert_close(gradient.cpu(), expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_pooled_or_padded_may_be_computed_in_the_same_kernel(size):
    """See pytorch#189895: the mask of what is read there is easily forgotten."""

    def both(x):
        normed = F.group_norm(x, 1)
        return F.avg_pool2d(normed, 3, 1, 1, count_include_pad=False) - normed, F.pad(x.sum((1, 2, 3)), (1, 0))

    torch.manual_seed(0)
    x = torch.randn(4, 512, size, size, device="cuda")
    torch.testing.assert_close(ms.compile(both, strict=True)(x), both(x), rtol=1e-4, atol=1e-3)
