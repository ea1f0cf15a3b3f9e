"""Judges of whole cases: luck of eager's does not refuse a right side, and a fault that was found is found still."""

import copy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import millstream as ms
from benchmarks.cases.models import TRAINING, Inference, TrainingCase, labelled, language, shape
from benchmarks.cases.networks import small_cnn
from benchmarks.inference import SampledInferenceJudge
from benchmarks.measuring.baselines import InferenceJudge, TrainingJudge, trainee
from benchmarks.measuring.harness import sound_pools
from benchmarks.training import SampledTrainingJudge

CPU = torch.device("cpu")
SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1.0}
(TRANSFORMER,) = (case for case in TRAINING if case.name.startswith("transformer"))


def images(autocast):
    batch = labelled(shape(8, 3, 16, 16), 10)
    return TrainingCase("images", lambda _: small_cnn(8), batch, torch.optim.SGD, SGD, autocast).make(CPU)


def text(autocast):
    return replace(TRANSFORMER, autocast=autocast).make(CPU, tiny=True)


def take_steps(judge, problem, plant=lambda side: None):
    side = trainee(problem)
    plant(side)
    return judge.results(side, problem.make_step(side.model, side.optimizer))


def never_update(side):
    side.optimizer.param_groups[0]["params"].pop(3)


def learn_too_fast(side):
    side.optimizer.param_groups[0]["lr"] *= 1.1


def forget_weight_decay(side):
    side.optimizer.param_groups[0]["weight_decay"] = 0.0


def average_otherwise(side):
    norms = [module for module in side.model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum *= 1.5


def scale_one_gradient(side):
    list(side.model.parameters())[3].register_hook(lambda gradient: 1.05 * gradient)


FAULTS = [
    *((images, torch.bfloat16, fault) for fault in (never_update, learn_too_fast, forget_weight_decay)),
    *((text, torch.bfloat16, fault) for fault in (never_update, learn_too_fast, forget_weight_decay)),
    (images, torch.bfloat16, average_otherwise),
    (images, None, scale_one_gradient),
    (text, None, scale_one_gradient),
]


@pytest.mark.parametrize(("make", "autocast", "plant"), FAULTS)
def test_a_fault_that_one_run_of_eagers_shows_is_found_by_several(make, autocast, plant):
    problem = make(autocast)
    for judge in (TrainingJudge(problem), SampledTrainingJudge(problem)):
        assert judge.judge(take_steps(judge, problem)).equal
        assert "differ" in judge.judge(take_steps(judge, problem, plant)).reason


class Difference(nn.Module):
    """What is left of two halves that are almost the same: exact, whatever they are, if nothing is done to them."""

    def __init__(self, factor=1.0, wrong=1.0):
        super().__init__()
        self.factor, self.wrong = factor, wrong

    def forward(self, x):
        first, second = (self.factor * x).chunk(2, 1)
        return (first - self.wrong * second) / self.factor


def almost_equal_halves():
    first = torch.rand(16, 256) + 1
    return (torch.cat([first, first + torch.randn_like(first) / 64], 1).half(),)


def test_a_lucky_run_of_eagers_does_not_refuse_a_right_side():
    torch.manual_seed(0)
    problem = Inference(Difference(), almost_equal_halves(), almost_equal_halves(), CPU, torch.float16)
    right, wrong = Difference(factor=3.0), Difference(wrong=1.01)
    assert "differs" in InferenceJudge(problem).judge(right, None).reason
    judge = SampledInferenceJudge(problem)
    assert judge.judge(right, None).equal
    assert "differs" in judge.judge(wrong, None).reason


class Recorder(nn.Module):
    """Remembers, of each call of any copy, a random number and the input."""

    calls: ClassVar = []

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(8, 8)

    def forward(self, x):
        self.calls.append((float(torch.rand(())), x.double()))
        return x.unsqueeze(-1) * self.inner.weight[0] if x.is_floating_point() else self.inner(x)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_eager_runs_on_neighbours_with_the_same_random_numbers(has_tokens):
    batch = language(8, 4, 5, tiny=(4, 5)) if has_tokens else lambda _: (torch.rand(4, 5), torch.randint(8, (4, 5)))
    problem = TrainingCase("a", lambda _: Recorder(), batch, torch.optim.SGD, {"lr": 0.1}).make(CPU)
    Recorder.calls.clear()
    before = copy.deepcopy((problem.batches, problem.model.state_dict()))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    SampledTrainingJudge(problem)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close((problem.batches, problem.model.state_dict()), before, rtol=0, atol=0)

    precise, plain, *others = runs = [Recorder.calls[first : first + 4] for first in range(0, len(Recorder.calls), 4)]
    assert len(others) == (0 if has_tokens else 4)
    assert {tuple(draw for draw, _ in run) for run in runs} == {tuple(draw for draw, _ in plain)}
    (_, x), (_, the_same) = plain[0], precise[0]
    assert torch.equal(x, the_same)
    for run in others:
        assert not torch.equal(run[0][1], x)
        torch.testing.assert_close(run[0][1], x, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("pool", [nn.AvgPool2d(3, 1, 1), lambda x: nn.functional.avg_pool2d(x, 3, padding=1)])
def test_average_pools_of_who_is_judged_by_never_see_channels_last(pool):
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    with sound_pools():
        y = pool(x)
    assert y.is_contiguous()
    assert not pool(x).is_contiguous()
    assert torch.equal(y, pool(x))
    assert all(map(torch.equal, *([torch.autograd.grad(out.square().sum(), x)[0]] for out in (y, pool(x)))))


def test_a_step_that_begins_with_sound_pools_is_captured():
    """As ours does in the training suite; what pools by then is not what it continues with."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(3, 1, 1), nn.Flatten(), nn.Linear(8 * 4 * 4, 2))
    twin = copy.deepcopy(model)

    def make(network):
        optimizer = torch.optim.SGD(network.parameters(), 0.1)

        def step(x):
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    captured, eager = ms.step(make(model), strict=True), make(twin)
    batches = [torch.randn(2, 3, 6, 6) for _ in range(4)]
    with sound_pools():
        losses = [captured(batches[0]).detach()]
    losses += [captured(x).detach() for x in batches[1:]]
    torch.testing.assert_close(losses, [eager(x).detach() for x in batches])
    assert ms.explain(captured).to_dict()["programs"]
