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
