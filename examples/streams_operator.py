"""An operator with an auxiliary stream inside: the two gradients of a matrix product, side by side.

python examples/streams_operator.py [STEPS]
"""

import sys
from typing import Any

import torch
from torch import Tensor

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Product(torch.autograd.Function):
    """``x @ weight``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with ms.manual.aux_streams(2, grad.device) as (_, aux):  # one stream where there is no other: the same numbers
            for_x = grad @ weight.t()
            for_weight = aux.mm(x.t(), grad)
        return for_x, for_weight


weight = torch.randn(64, 64, device=device, requires_grad=True)
target = torch.randn(64, 64, device=device)
x = torch.randn(256, 64, device=device, requires_grad=True)

ours = torch.autograd.grad(Product.apply(x, weight).sum(), [x, weight])
theirs = torch.autograd.grad((x @ weight).sum(), [x, weight])
print("PyTorch's gradients:", all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True)))

for step in range(STEPS):
    loss = (Product.apply(x, weight) - x.detach() @ target).square().mean()
    (grad,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 10 * grad
    if step % 5 == 0:
        print(f"step {step:2}  loss {loss.item():.3f}")
