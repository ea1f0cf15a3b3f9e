"""Gradients of models that update what they have read: those of eager."""

import copy

import pytest
import torch
from torch import nn

import millstream as ms


class RunningScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        y = self.layer(x)
        scale = (self.mean[None] + 1e-5).rsqrt()  # of a view
        with torch.no_grad():
            self.mean.lerp_(y.square().mean(0), 0.5)
        return y * scale


def spectral():
    return torch.nn.utils.spectral_norm(nn.Linear(4, 4))


def assert_gradients_are_right(model, **settings):
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True, **settings)
    for _ in range(3):
        x = 3 * torch.randn(8, 4).to(next(model.parameters()).device)
        for network in (compiled, twin):
            network(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [RunningScale, spectral])
def test_gradients_are_of_what_was_read_before_it_was_written(make):
    assert_gradients_are_right(make())


@pytest.mark.parametrize("several", [False, True])
def test_a_pass_of_the_users_comes_behind(several):
    seen = []

    def look(graph):
        marked = [node for node in graph.nodes if "recompute" in node.meta]
        seen.append(len(marked))

    compiled = ms.compile(
        RunningScale(), strict=True, options={"joint_custom_post_pass": [look, look] if several else look}
    )
    compiled(torch.randn(2, 4)).sum().backward()
    assert len(seen) == 1 + several
    assert all(seen)
