"""The traced graphs are what AOT autograd and Inductor take: writes to inputs, numbers, random operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from millstream.capture import Step
from tests.capture.worlds import World, batches, check, compile_with_inductor


def test_statistics_clipping_and_cycled_momentum():
    def make():
        layers = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
        model = nn.Sequential(*layers)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=8)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            return loss, norm

        world = World(step, [model], [opt])
        world.scheduler = scheduler
        return world

    def advance(world, number):
        if number:
            world.scheduler.step()

    # Two graphs: with constant betas, then with betas that are read. Fused kernels round otherwise than eager's.
    step = check(
        make, batches(7, 4, 2, 4, 4), between=advance, build=compile_with_inductor, graphs=2, rtol=1e-3, atol=1e-4
    )
    assert step.graphs[-1].num_runs >= 4


def test_gradient_scaler():
    def make():
        model = nn.Linear(4, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def step(x, y, factor):
            loss = F.cross_entropy(model(x), y) * factor
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return loss, scaler._scale

        return World(step, [model], [opt])

    good, bad = torch.tensor(1.0), torch.tensor(float("inf"))
    data = [(x, y, bad if number == 4 else good) for number, (x, y) in enumerate(batches(7, 6, 4))]
    check(make, data, build=compile_with_inductor, rtol=1e-4, atol=1e-5)


def test_gradients_that_stay_and_an_argument_that_is_written():
    def make():
        model = nn.Linear(4, 3)
        hidden = torch.zeros(3)

        def step(x, y, seen):
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            seen.add_(1)
            hidden.lerp_(out.detach().mean(0), 0.5)
            return loss, out[0], model.weight[1:], seen

        return World(step, [model], tensors=[hidden])

    data = [(x, y, torch.zeros(2)) for x, y in batches(4, 6, 4)]
    check(make, data, build=compile_with_inductor, graphs=2, rtol=1e-4, atol=1e-5)


def test_dropout_in_a_checkpoint_is_reproducible_and_differs_from_step_to_step():
    def run(seed):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh())
        head = nn.Linear(16, 1)

        def step(x):
            loss = head(checkpoint(block, x, use_reentrant=False)).mean()
            grads = torch.autograd.grad(loss, [*block.parameters(), *head.parameters()])
            return loss, grads

        captured = Step(step, build=compile_with_inductor, strict=True)
        x = torch.ones(3, 4)
        torch.manual_seed(seed)
        return [float(captured(x)[0]) for _ in range(4)]

    first = run(1)
    assert run(1) == first
    assert len(set(first)) == 4
