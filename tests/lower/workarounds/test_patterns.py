"""Patterns of Inductor's that would match what they should not: sums of scaled matrix products."""

import pytest
import torch

import millstream as ms
from tests import networks

FORMS = {
    "product first": lambda a, x, w: torch.add(x @ w, a, alpha=0.3),
    "product second": lambda a, x, w: torch.add(a, x @ w, alpha=0.3),
    "two products": lambda a, x, w: torch.add(x @ w, (x * 2) @ w, alpha=-0.5),
    "in place": lambda a, x, w: a.clone().add_(x @ w, alpha=-0.1),
    "difference": lambda a, x, w: torch.sub(a, x @ w, alpha=0.3),
    "with a bias": lambda a, x, w: torch.add(a, torch.addmm(a[0], x, w), alpha=0.2),
    "scaled within": lambda a, x, w: torch.addmm(a[0], x, w, beta=0.3, alpha=2.0).relu(),
    "several matrices": lambda a, x, w: torch.add(a[None], torch.bmm(x[None], w[None]), alpha=0.2),
    "of a number": lambda a, x, w: torch.add(x @ w, 2.0, alpha=0.3),
    "of integers": lambda a, x, w: torch.add(torch.arange(6), torch.arange(6), alpha=3),
    "complex": lambda a, x, w: torch.add(a + 1j, x @ w, alpha=0.3j),
    "of half precision": lambda a, x, w: torch.add(torch.ones(7).half(), torch.ones(7) * len(a), alpha=0.5),
    "attention": lambda a, x, w: torch.add(x @ x.T, (x @ x.T).detach() * 0 - 1, alpha=0.3).softmax(-1) @ x,
}


@pytest.mark.filterwarnings("ignore:.*complex")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_added_is_scaled(form):
    torch._dynamo.reset()
    inputs = torch.randn(6, 7), torch.randn(6, 5), torch.randn(5, 7)
    compiled = ms.compile(FORMS[form], strict=True)
    expected = FORMS[form](*inputs)
    with torch.no_grad():
        result = compiled(*inputs)
    torch.testing.assert_close(result, expected)


def test_a_step_by_hand_goes_as_far_as_it_should():
    ends = []
    for wrap in (lambda step: step, ms.step(strict=True)):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)

        @wrap
        def step(x, model=model):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
            model.zero_grad()

        for _ in range(3):
            step(x)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    networks.assert_close(*ends)
