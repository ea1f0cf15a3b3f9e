"""Every optimizer steps as in eager mode, with learning rates and hyperparameters that change."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import World, batches, check, interpret, mlp


def halving(parameters, lr):
    """A hook writes to the gradients before each step."""

    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)
    optimizer.register_step_pre_hook(halve)
    return optimizer


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, dampening=0.1),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    "nesterov after a hook": halving,
    "nesterov one by one": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, foreach=False),
    "nesterov in lists": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, foreach=True),
    "nesterov fused": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, fused=True),
    "maximize": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, maximize=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=0.01),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "amsgrad": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
    "rmsprop centered": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9, centered=True),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, lr_decay=0.1, initial_accumulator_value=0.1),
    "nadam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "radam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=lr),
    "adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "asgd": lambda p, lr: torch.optim.ASGD(p, lr=lr),
    "rprop": lambda p, lr: torch.optim.Rprop(p, lr=lr),
}


@pytest.mark.parametrize(("kind", "beta"), [("Adam", 0.999), ("AdamW", 0.99999), ("RAdam", 0.99999)])
def test_corrections_of_bias_are_as_exact_as_in_eager_mode(kind, beta):
    """Their counts are in single precision, too little of which is left of ``1 - beta ** step``."""

    def make(dtype):
        world = mlp(lambda parameters, lr: getattr(torch.optim, kind)(parameters, lr, betas=(0.9, beta)), 1e-3)
        world.modules[0].to(dtype)
        return world

    double = [(x.double(), y) for x, y in batches(20, 6, 4)]
    check(partial(make, torch.float64), double, rtol=1e-8, atol=1e-10)
    # A parameter near zero has moved by 1e-3 a step: of that, as much as single precision holds.
    check(partial(make, torch.float32), batches(20, 6, 4), rtol=1e-5, atol=5e-7 if kind != "RAdam" else 2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_with_a_changing_float_rate(name):
    """Gradients are those that eager PyTorch leaves, too: SGD's form for lists adds Nesterov's momentum to them."""

    def slow_down(world, number):
        world.optimizers[0].param_groups[0]["lr"] = 0.05 * 0.9**number

    make = partial(mlp, OPTIMIZERS[name], leaves_gradients=True)
    graphs = 2 if name == "adagrad" else 1  # which has its state at once, and no gradients in its first call
    step = check(make, batches(20, 6, 4), between=slow_down, rtol=2e-4, atol=2e-5, graphs=graphs)
    assert step.graphs[-1].num_runs >= 18


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_tensor_rate(name):
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[name]

    def make():
        return mlp(lambda p, lr: kind(p, lr=torch.tensor(lr), foreach=False))

    def slow_down(world, number):
        world.optimizers[0].param_groups[0]["lr"].fill_(0.05 * 0.9**number)

    check(make, batches(6, 6, 4), between=slow_down, rtol=2e-4, atol=2e-5)


SCHEDULERS = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1)),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_write_the_rate(name):
    def advance(world, number):
        if number:
            world.plan.step()

    check(lambda: mlp(OPTIMIZERS["momentum"], scheduler=SCHEDULERS[name]), batches(8, 6, 4), between=advance)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_rates_of_numpy(kind):
    def slow_down(world, number):
        world.optimizers[0].param_groups[0]["lr"] = kind(0.05) * kind(0.9) ** number

    step = check(lambda: mlp(OPTIMIZERS["momentum"]), batches(8, 6, 4), between=slow_down)
    assert step.graphs[0].num_runs == 7


def test_a_rate_that_is_returned_is_the_present_one():
    def make():
        world = mlp(OPTIMIZERS["momentum"], scheduler=SCHEDULERS["lambda"])
        inner, group = world.step, world.optimizers[0].param_groups[0]
        world.step = lambda x, y: {"lr": group["lr"], "loss": inner(x, y), "more": [2 * group["lr"], group["momentum"]]}
        return world

    def advance(world, number):
        if number:
            world.plan.step()

    check(make, batches(8, 6, 4), between=advance)


def test_a_rate_that_is_asked_about_in_every_call_is_named():
    weight = torch.nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=1.0)
    table = {1.0 + number: 1.0 + number for number in range(12)}  # in which a number is looked up by its value
    captured = Step(lambda x: x * table[opt.param_groups[0]["lr"]], build=interpret, max_graphs=2)
    with pytest.warns(FallbackWarning, match=r"value of param_groups\[0\]\['lr'\], which changes"):
        for number in range(12):
            opt.param_groups[0]["lr"] = 1.0 + number
            assert captured(torch.ones(2)).tolist() == [1.0 + number] * 2


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adamw", "amsgrad", "nadam", "radam", "rmsprop centered"])
def test_one_cycle_changes_momentum_or_betas_without_a_graph_per_step(name):
    def advance(world, number):
        if number:
            world.plan.step()

    def scheduler(opt):
        return lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=12)

    # Two graphs: the second reads what was seen to change.
    step = check(
        lambda: mlp(OPTIMIZERS[name], scheduler=scheduler),
        batches(12, 6, 4),
        between=advance,
        graphs=2,
        rtol=2e-4,
        atol=2e-5,
    )
    assert step.graphs[-1].num_runs >= 8


def test_hyperparameter_changes_once():
    def change(world, number):
        if number == 4:
            world.optimizers[0].param_groups[0]["weight_decay"] = 0.1

    check(lambda: mlp(OPTIMIZERS["momentum"]), batches(8, 6, 4), between=change, graphs=2)


def test_a_question_about_a_cycled_number_is_asked_again():
    def change(world, number):
        world.optimizers[0].param_groups[0]["momentum"] = [0.9, 0.9, 0.8, 0.7, 0.6, 0.5][number] if number < 6 else 0.0

    check(lambda: mlp(OPTIMIZERS["momentum"]), batches(8, 6, 4), between=change, graphs=3)


def test_groups_have_rates_of_their_own():
    def optimizer(parameters, lr):
        parameters = list(parameters)
        return torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 10 * lr, "weight_decay": 0.0}, {"params": parameters[2:]}], lr=lr
        )

    def change(world, number):
        world.optimizers[0].param_groups[1]["lr"] = 0.01 * (number + 1)

    step = check(lambda: mlp(optimizer), batches(6, 6, 4), between=change, rtol=2e-4, atol=2e-5)
    assert [name for name in step.graphs[0].state_names if ".lr" in name] == ["opt.lr[0]", "opt.lr[1]"]


def test_state_has_names_for_people():
    step = check(lambda: mlp(OPTIMIZERS["momentum"]), batches(3, 6, 4))
    names = step.graphs[0].state_names
    assert names[:2] == ["model.0.weight", "model.0.bias"]
    assert "opt.momentum_buffer[model.0.weight]" in names
    assert step.graphs[0].signature == {"x": "float32[6, 4]", "y": "int64[6]"}


def test_an_optimizer_of_the_users_own_that_takes_plain_numbers():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr, "beta": 0.9})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = torch.zeros_like(parameter)
                    state["mean"] = state["mean"] * group["beta"] + parameter.grad * (
                        1 - group["beta"]
                    )  # a new tensor each time
                    parameter.data.add_(state["mean"], alpha=-group["lr"])

    def slow_down(world, number):
        world.optimizers[0].param_groups[0]["lr"] = 0.05 * 0.9**number

    check(lambda: mlp(Own), batches(6, 6, 4), between=slow_down)


def test_resumed_optimizer_is_captured_in_its_first_call():
    def make():
        world = mlp(OPTIMIZERS["adamw"])
        world.step(*batches(1, 6, 4, seed=9)[0])
        return world

    step = check(make, batches(4, 6, 4), rtol=2e-4, atol=2e-5)
    assert step.graphs[0].num_runs == 4


def test_flags_of_the_optimizer_are_as_before():
    torch.manual_seed(0)
    step = check(
        lambda: mlp(lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True)), batches(4, 6, 4), rtol=2e-4, atol=2e-5
    )
    assert step.graphs


def identity(value):
    return value


def fivefold(value):
    return 5 * value


class Configured(torch.optim.Optimizer):
    """Reads numbers, lists, dicts and functions of its groups."""

    def __init__(self, params):
        super().__init__(
            params, {"lr": 0.1, "initial_scale": 1.0, "nested": {"a": [1.0]}, "factors": [1.0], "function": identity}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            scale = group["lr"] * group["initial_scale"] * group["nested"]["a"][0] * sum(group["factors"])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["function"](scale))


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(initial_scale=3.0),
        lambda group: group["nested"].update(a=[2.0]),
        lambda group: group["nested"]["a"].__setitem__(0, 4.0),
        lambda group: group.update(nested={"a": [2.0]}),
        lambda group: group["factors"].append(2.0),
        lambda group: group.update(factors=[7.0]),
        lambda group: group.update(function=fivefold),
    ],
)
def test_whatever_an_optimizer_may_read_of_its_groups_is_noticed(change):
    ends = []
    for wrap in (lambda step: step, lambda step: Step(step, build=interpret)):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = Configured(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        wrapped = wrap(step)
        for number in range(6):
            if number == 4:
                change(optimizer.param_groups[0])
            torch.manual_seed(number)
            wrapped(torch.randn(3, 4))
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))


def cumulative(average, new, count):
    return average + (new - average) / (count + 1)


@torch.no_grad()
def lerps(averages, news, count):
    for average, new in zip(averages, news, strict=True):
        average.lerp_(new, 1 / (count.item() + 1))


AVERAGES = {
    "equal weights": {},
    "equal weights, several at once": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "exponential, with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "a function of the user's": {"avg_fn": cumulative},
    "one that reads the count": {"multi_avg_fn": lerps},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(kind):
    def make():
        world = mlp(partial(torch.optim.SGD, momentum=0.9), 0.1)
        model, step = nn.Sequential(world.modules[0], nn.BatchNorm1d(2)), world.step
        average = swa_utils.AveragedModel(model, **AVERAGES[kind])

        def step_and_average(x, y):
            loss = step(x, y)
            model[1](x[:, :2])  # its buffers change
            average.update_parameters(model)
            return loss

        return World(step_and_average, [model, average], world.optimizers)

    def start_anew(world, number):
        if number == 3:
            world.modules[1].n_averaged.zero_()

    check(make, batches(5, 6, 4), between=start_anew)
