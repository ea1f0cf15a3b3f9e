"""``.grad`` after a call is what eager mode would leave, wherever the gradients are set to nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from millstream.capture import Step
from tests.capture.worlds import World, assert_same, batches, check, interpret


def world(where, to_none=True):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        if where == "first":
            opt.zero_grad(set_to_none=to_none)
        loss = F.cross_entropy(model(x), y)
        if where == "middle":
            opt.zero_grad(set_to_none=to_none)
        loss.backward()
        opt.step()
        if where == "last":
            opt.zero_grad(set_to_none=to_none)
        if where == "module":
            model.zero_grad(set_to_none=to_none)
        return loss

    return World(step, [model], [opt])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("where", ["first", "middle", "last", "module", "never"])
def test_zero_grad_anywhere(where, to_none):
    check(lambda: world(where, to_none), batches(6, 6, 4), graphs=None)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("where", ["never", "last"])
def test_zero_grad_between_calls(where, to_none):
    def clear(world, number):
        world.optimizers[0].zero_grad(set_to_none=to_none)

    step = check(lambda: world(where), batches(8, 6, 4), between=clear, graphs=None)
    assert max(graph.num_runs for graph in step.graphs) >= 6


def test_gradients_of_eager_code_between_calls_are_used():
    def interfere(world, number):
        if number in (2, 3, 5):
            (world.modules[0](torch.ones(2, 4)).sum()).backward()

    step = check(lambda: world("never"), batches(8, 6, 4), between=interfere, graphs=None)
    assert len(step.graphs) <= 2


def test_accumulation_over_several_calls_by_two_steps():
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def accumulate(x, y):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss

        def update():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
            return norm

        accumulate, update = wrap(accumulate), wrap(update)
        losses = []
        for number, batch in enumerate(batches(12, 6, 4)):
            losses.append(accumulate(*batch).item())
            if number % 3 == 2:
                losses.append(update().item())
        return World(None, [model], [opt]).state(), losses, (accumulate, update)

    ours = run(lambda function: Step(function, build=interpret, strict=True))
    theirs = run(lambda function: function)
    assert_same(ours[:2], theirs[:2], rtol=2e-4, atol=2e-5)
    accumulate, update = ours[2]
    assert len(accumulate.graphs) == 2  # the first gradient, and another on top
    assert len(update.graphs) == 1


def test_a_parameter_without_gradient_keeps_none():
    def make():
        model = nn.ModuleDict({"used": nn.Linear(4, 3), "idle": nn.Linear(4, 3)})
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model["used"](x), y)
            loss.backward()
            opt.step()
            return loss

        return World(step, [model], [opt])

    check(make, batches(5, 6, 4), rtol=2e-4, atol=2e-5)


def test_gradient_returned_by_the_step():
    def make():
        model = nn.Linear(4, 3)

        def step(x, y):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            return model.weight.grad, model.bias.grad * 2

        return World(step, [model])

    check(make, batches(4, 6, 4), graphs=None)


def state_in_many_forms(*, to_none):
    """A step that returns gradients and state, as they are and as parts or copies of them."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    opt = torch.optim.Adam(model.parameters(), 0.1)

    def step(x):
        opt.zero_grad(set_to_none=to_none)
        model(x).pow(3).mean().backward()
        opt.step()
        gradient, average = model.weight.grad, opt.state[model.weight]["exp_avg"]
        own = [gradient.detach(), gradient.data, gradient[1:], gradient.view(-1), gradient.clone()]
        own += [model.weight.detach(), model.weight.data, model.weight[0], average.view(-1), model.running_mean[:2]]
        objects = {"weight": model.weight, "average": average, "step": opt.state[model.weight]["step"]}
        return own, objects, {"gradient": gradient, "list": [model.bias.grad]}

    return step


@pytest.mark.parametrize("to_none", [True, False])
def test_what_a_step_returns_is_as_in_eager_after_later_calls(to_none):
    """Also what the first call returned, which ran eagerly: parts of state are copies, state is itself."""
    theirs = state_in_many_forms(to_none=to_none)
    ours = Step(state_in_many_forms(to_none=to_none), build=interpret, strict=True)
    kept, expected = [], []
    for number in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        own, objects, gradients = theirs(x)
        kept.append(ours(x))
        expected.append(([each.clone() for each in own], objects, gradients))
        if not to_none:
            assert kept[-1][2]["gradient"] is kept[0][2]["gradient"]
    assert len(ours.graphs) == 1
    for result, known in zip(kept, expected, strict=True):
        assert_same(result, known)
        assert all(result[1][name] is kept[0][1][name] for name in known[1])
