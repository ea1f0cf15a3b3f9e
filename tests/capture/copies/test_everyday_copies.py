"""Copies of state as steps and models have them: target networks, averaged and earlier weights, frames, statistics.

All are in one graph. What was copied keeps the value from before, whichever of the two is met first.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import dynamo_backend

SIZES = 4, 6, 5


class Remembering(torch.optim.Optimizer):
    """Keeps the weights from before its last step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        for each in self.param_groups[0]["params"]:
            self.state[each]["previous"] = each.detach().clone()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                previous = self.state[each]["previous"]
                moved = each - previous
                previous.copy_(each)
                each.add_(0.5 * moved - group["lr"] * each.grad)


def update_by_copy(source, target):
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.copy_(theirs)


def update_by_state(source, target):
    target.load_state_dict(source.state_dict())


def update_by_data(source, target):
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.data.copy_(theirs.data)


UPDATES = update_by_copy, update_by_state, update_by_data


class Carrying(nn.Module):
    """A model that carries state from call to call, and keeps what that was before."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(3), nn.Linear(3, 3)
        for name in ("h_prev", "h_before", "mean_before", "variance_before", "a_mean"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("frames", torch.zeros(3, 3))
        self.register_buffer("stack", torch.zeros(2, 3))

    def forward(self, x):
        with torch.no_grad():
            self.mean_before.copy_(self.norm.running_mean)
            self.variance_before.copy_(self.norm.running_var)
            self.a_mean.copy_(self.mean_before)
        h = torch.tanh(self.inner(self.norm(x)) + self.h_prev.clone())
        with torch.no_grad():
            self.h_before.copy_(self.h_prev)
            self.h_prev.copy_(h.mean(0))
            self.stack[0].copy_(self.frames[0])
            self.frames[:-1].copy_(self.frames[1:].clone())
            self.frames[-1].copy_(x.mean(0))
            self.stack[1].copy_(self.frames[-1])
        return h


def training():
    """A step of training with all of it, and what there is to compare."""
    torch.manual_seed(0)
    policy_net, target_net, net, frozen = (nn.ModuleList(nn.Linear(3, 2) for _ in UPDATES) for _ in range(4))
    carrying, weight = Carrying(), nn.Parameter(torch.randn(2, 3))
    averaged, anchor, hidden = weight.detach().clone(), torch.zeros(2, 3), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*policy_net.parameters(), *net.parameters(), *carrying.parameters(), weight], 0.1)
    remembering = Remembering(hidden.parameters(), 0.1)

    def step(x):
        h = carrying(x)
        loss = (h @ weight.t()).square().mean() + (weight - anchor).square().sum() + hidden(h).square().mean()
        for source, target in ((policy_net, target_net), (net, frozen)):
            for ours, theirs in zip(source, target, strict=True):
                loss = loss + (ours(x) - theirs(x).detach()).sub(1).square().mean()
        loss.backward()
        with torch.no_grad():
            for source, target in ((policy_net, target_net), (net, frozen)):
                for update, ours, theirs in zip(UPDATES, source, target, strict=True):
                    update(ours, theirs)
            anchor.copy_(weight)
            averaged.lerp_(weight, 0.25)
        optimizer.step()
        remembering.step()
        with torch.no_grad():
            kept = weight.clone()
            weight.copy_(averaged)
            averaged.copy_(kept)
        for each in (optimizer, remembering):
            each.zero_grad()
        return loss

    def state():
        modules = policy_net, target_net, net, frozen, carrying, hidden
        previous = [each["previous"] for each in remembering.state.values()]
        return [*(value for module in modules for value in module.state_dict().values()), weight, averaged, *previous]

    return step, lambda: [*state(), anchor]


def with_backward(wrap):
    """Calls of a model and its backward pass, and what there is to compare."""
    torch.manual_seed(0)
    model = Carrying()
    call = wrap(model)

    def step(x):
        loss = call(x).square().sum()
        loss.backward()
        return loss

    return step, lambda: [*model.state_dict().values(), *(each.grad for each in model.parameters())]


def after_each_call(step, state, sizes):
    generator = torch.Generator().manual_seed(0)
    for rows in sizes:
        loss = step(torch.randn(rows, 3, generator=generator))
        yield copy.deepcopy([loss.detach(), *(each.detach() for each in state())])


def test_a_step_is_as_in_eager_at_any_size():
    step, state = training()
    captured = ms.step(step, strict=True, engine="serial", dynamic=True)
    found = [*after_each_call(captured, state, SIZES)]
    torch.testing.assert_close(found, [*after_each_call(*training(), SIZES)])
    assert len(captured.graphs) == 1


@pytest.mark.parametrize(
    "wrap",
    [
        partial(ms.compile, strict=True, engine="serial", dynamic=True),
        partial(torch.compile, backend=dynamo_backend, options={"engine": "serial", "strict": True}),
    ],
    ids=["compile", "backend"],
)
def test_a_model_and_its_backward_pass_are_as_in_eager(wrap):
    torch._dynamo.reset()
    sizes = SIZES if wrap.func is ms.compile else (4, 4)
    expected = [*after_each_call(*with_backward(lambda model: model), sizes)]
    torch.testing.assert_close([*after_each_call(*with_backward(wrap), sizes)], expected)
