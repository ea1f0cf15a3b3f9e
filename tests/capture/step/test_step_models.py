"""Whole networks and training recipes against eager mode."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import millstream as ms
from millstream.capture import Step
from tests.capture.worlds import World, assert_same, batches, check, interpret
from tests.networks import ALL, ResNet, example


def plain(model, optimizer=None, **options):
    opt = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [model], [opt], **options)


@pytest.mark.parametrize("kind", ALL)
def test_twenty_steps_of_each_network(kind):
    torch.manual_seed(1)
    step = check(lambda: plain(kind()), [example(kind) for _ in range(20)])
    assert step.graphs[0].num_runs >= 19


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    def make():
        return plain(Tied(), torch.optim.Adam)

    data = [(torch.randint(0, 7, (6,)), torch.randint(0, 7, (6,))) for _ in range(5)]
    step = check(make, data, rtol=2e-4, atol=2e-5)
    assert sum("weight" in name and "[" not in name for name in step.graphs[0].state_names) == 1


def test_frozen_parameters():
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        return plain(model)

    check(make, batches(5, 6, 4))


def test_gan_has_two_modules_and_two_optimizers():
    def make():
        generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        opt_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        opt_c = torch.optim.RMSprop(critic.parameters(), lr=0.01)

        def step(real, noise):
            opt_c.zero_grad()
            fake = generator(noise)
            real_loss = F.softplus(-critic(real)).mean()
            fake_loss = F.softplus(critic(fake.detach())).mean()
            (real_loss + fake_loss).backward()
            opt_c.step()
            opt_g.zero_grad()
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            loss = F.softplus(-critic(fake)).mean()
            loss.backward()
            opt_g.step()
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
            return {"critic": real_loss + fake_loss, "generator": loss}

        return World(step, [generator, critic], [opt_g, opt_c])

    check(make, [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(6)], rtol=2e-4, atol=2e-5)


def test_moving_average_by_lerp():
    def make():
        model = nn.Linear(4, 3)
        average = copy.deepcopy(model).requires_grad_(False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            return loss

        return World(step, [model, average], [opt])

    check(make, batches(5, 6, 4))


def test_accumulation_unrolled_in_one_step():
    def make():
        model = nn.Linear(4, 3)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            total = 0.0
            for part, labels in zip(x.chunk(3), y.chunk(3), strict=True):
                loss = F.cross_entropy(model(part), labels) / 3
                loss.backward()
                total = total + loss.detach()
            opt.step()
            opt.zero_grad()
            return total

        return World(step, [model], [opt])

    check(make, batches(5, 6, 4), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("how", ["norm", "norm single", "value", "total"])
def test_clipping(how):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = None
            if how == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=how != "norm single")
            opt.step()
            opt.zero_grad()
            return loss, norm

        return World(step, [model], [opt])

    check(make, batches(5, 6, 4))


@pytest.mark.parametrize("outside", [True, False])
def test_bfloat16_autocast(outside):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu") or not outside):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, [model], [opt])

    if not outside:
        step = check(make, batches(5, 6, 4), rtol=1e-3, atol=1e-4)
    else:
        step = Step(make().step, build=interpret, strict=True)
        for number, batch in enumerate(batches(6, 6, 4)):
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
                step(*batch)
        assert len(step.graphs) == 2
        with torch.autocast("cpu", torch.bfloat16):
            step(*batch)
    dtypes = [node.meta["val"].dtype for node in step.graphs[-1].gm.graph.nodes if "addmm" in node.name]
    assert dtypes
    assert set(dtypes) == {torch.bfloat16}


def scaled(clip=False, dtype=torch.float16, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **options)

    def step(x, y, factor):
        with torch.autocast("cpu", dtype):
            out = model(x)
        loss = F.cross_entropy(out.float(), y) * factor
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss

    world = World(step, [model], [opt])
    world.scaler = scaler
    return world


@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler_skips_steps_grows_and_backs_off(clip):
    worlds = []

    def make():
        world = scaled(clip, torch.bfloat16, init_scale=8.0, growth_interval=3)
        worlds.append(world)
        return world

    bad = torch.tensor(float("inf"))
    data = [
        (x, y, bad if number in (3, 4, 9) else torch.tensor(1.0)) for number, (x, y) in enumerate(batches(12, 6, 4))
    ]
    scales = []

    def compare(world, number):
        if world is worlds[-1] and number:
            assert worlds[0].scaler.state_dict() == worlds[1].scaler.state_dict()
            scales.append(world.scaler.get_scale())

    step = check(make, data, between=compare, rtol=1e-3, atol=1e-4)
    assert step.graphs[0].num_runs == 11
    assert max(scales) > 8 > min(scales)


def test_grad_scaler_that_overflows_at_first():
    def make():
        return scaled(False, torch.float16, init_scale=2.0**24)

    data = [(x, y, torch.tensor(1.0)) for x, y in batches(16, 6, 4)]
    step = check(make, data, rtol=2e-3, atol=2e-3, graphs=None)
    assert len(step.graphs) <= 2


def test_disabled_grad_scaler():
    data = [(x, y, torch.tensor(1.0)) for x, y in batches(4, 6, 4)]
    check(lambda: scaled(True, torch.bfloat16, enabled=False), data, rtol=1e-3, atol=1e-4)


def dropping(**options):
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 3))
    return plain(model, **options)


def test_dropout_is_reproducible_and_differs_from_step_to_step():
    def run(seed):
        torch.manual_seed(0)
        world = dropping(optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        step = Step(world.step, build=interpret, strict=True)
        torch.manual_seed(seed)
        x, y = batches(1, 6, 4)[0]
        return [step(x, y).item() for _ in range(6)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1))) == 6


class Checkpointed(nn.Module):
    def __init__(self, reentrant, dropout):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)
        )
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes(reentrant, monkeypatch):
    """Whenever the garbage collector is at work: it moves what the trace has made away from what is new."""
    get_objects = gc.get_objects

    def after_collecting(generation):
        gc.collect(0)
        return get_objects(generation)

    monkeypatch.setattr(gc, "get_objects", after_collecting)
    step = check(lambda: plain(Checkpointed(reentrant, 0.0)), batches(4, 6, 4))
    tanhs = sum(node.target is torch.ops.aten.tanh.default for node in step.graphs[0].gm.graph.nodes)
    assert tanhs == 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_dropout_uses_the_masks_of_the_forward(reentrant):
    """The same gradients as without checkpointing, whose masks are drawn in the same order."""

    def make_stored():
        model = Checkpointed(reentrant, 0.4)
        model.forward = lambda x: model.last(nn.Sequential(*model.blocks)(model.first(x)))
        return plain(model)

    def run(make):
        torch.manual_seed(0)
        world = make()
        step = Step(world.step, build=interpret, strict=True)
        for number, batch in enumerate(batches(5, 6, 4)):
            torch.manual_seed(number)
            step(*batch)
        return world.state(), step.graphs[0].gm

    recomputed, graph = run(lambda: plain(Checkpointed(reentrant, 0.4)))
    stored, _ = run(make_stored)
    assert_same(recomputed, stored)
    drops = sum(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)
    assert drops == 7


def test_nested_checkpoints_with_dropout():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
            self.outer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
            self.head = nn.Linear(4, 3)
            self.is_stored = False

        def forward(self, x):
            if self.is_stored:
                return self.head(self.outer(self.inner(x)))

            def both(x):
                return self.outer(checkpoint(self.inner, x, use_reentrant=False))

            return self.head(checkpoint(both, x, use_reentrant=False))

    def run(stored):
        torch.manual_seed(0)
        model = Nested()
        model.is_stored = stored
        world = plain(model)
        step = Step(world.step, build=interpret, strict=True)
        for number, batch in enumerate(batches(4, 6, 4)):
            torch.manual_seed(number)
            step(*batch)
        return world.state()

    assert_same(run(False), run(True))


def test_statistics_of_batch_norm_and_eval_between():
    torch.manual_seed(0)

    def validate(world, number):
        if number == 3:
            model = world.modules[0].eval()
            with torch.no_grad():
                model(torch.ones(ResNet.example))
            model.train()

    check(lambda: plain(ResNet()), [example(ResNet) for _ in range(6)], between=validate)


def test_double_backward():
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, [model], [opt])

    check(make, [(torch.randn(5, 4),) for _ in range(4)])


def test_custom_autograd_function():
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 1)

    def make():
        model = nn.Linear(4, 3)
        model.forward = lambda x: Sign.apply(F.linear(x, model.weight)) + model.bias
        return plain(model)

    check(make, batches(4, 6, 4))


def test_closure_passed_to_the_optimizer():
    def make():
        model = nn.Linear(4, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            def closure():
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return opt.step(closure)

        return World(step, [model], [opt])

    check(make, batches(5, 6, 4), graphs=None)


def test_without_an_optimizer():
    def make():
        model = nn.Linear(4, 3)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            for parameter, grad in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                with torch.no_grad():
                    parameter -= 0.1 * grad
            return loss

        return World(step, [model])

    check(make, batches(4, 6, 4))


def test_parametrized_and_spectral_norm():
    def make():
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))
        return plain(model)

    check(make, batches(4, 6, 4))


def test_plain_lstm_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    check(lambda: plain(Net()), batches(4, 6, 5, 4))


def test_functional_transforms():
    def make():
        model = nn.Linear(4, 3)

        def step(x, y):
            parameters = dict(model.named_parameters())

            def loss_of(parameters, x, y):
                return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

            grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter -= 0.1 * grads[name].mean(0)
            return {name: grad.norm() for name, grad in grads.items()}

        return World(step, [model])

    check(make, batches(4, 6, 4))


def test_ensembles_have_their_base_model_on_meta():
    def make():
        models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval() for _ in range(3)]
        stacked, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        ensemble = nn.ParameterList(stacked.values())
        optimizer = torch.optim.Adam(ensemble, 0.05)

        def call(parameters, buffers, x):
            return torch.func.functional_call(base, (parameters, buffers), (x,))

        def step(x, y):
            results = torch.func.vmap(call, (0, 0, None))(dict(zip(stacked, ensemble, strict=True)), buffers, x)
            loss = F.cross_entropy(results.flatten(0, 1), y.repeat(3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return World(step, [ensemble], [optimizer])

    check(make, batches(4, 6, 4))


def test_state_on_meta_is_refused():
    state = torch.zeros(3, device="meta")
    step = Step(lambda x: (x + 1, state.add_(1)), build=interpret)
    with pytest.warns(ms.FallbackWarning, match="state, which is on meta"):
        assert torch.equal(step(torch.ones(3))[0], torch.full((3,), 2.0))


def test_lazy_modules():
    def make():
        return plain(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)))

    torch.manual_seed(0)
    step = Step(make().step, build=interpret, strict=True)
    for batch in batches(4, 6, 4):
        step(*batch)
    assert step.graphs[0].num_runs == 3
