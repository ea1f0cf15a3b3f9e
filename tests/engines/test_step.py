"""``ms.step`` on the real engines: parameters, buffers and optimizer state after 20 steps are those of eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.errors import CaptureError
from tests import networks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}
#: Adam divides by the root of squared gradients: where a gradient is all rounding, so is the sign of the update.
TOLERANCE = 2e-4

pytestmark = pytest.mark.usefixtures("lowered_once")


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()


def train(kind, make_optimizer, steps, device="cpu", engine=None):
    """Train one model by a captured step and its twin eagerly on the same batches; return both with their losses."""
    model = kind().to(device)
    twin = copy.deepcopy(model)
    sides = []
    for network in (model, twin):
        optimizer = make_optimizer(network.parameters())

        def step(x, y, network=network, optimizer=optimizer):
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        sides.append((network, optimizer, step))
    captured = ms.step(sides[0][2], strict=True, engine=engine)
    losses = ([], [])
    for _ in range(steps):
        x, y = networks.example(kind, device)
        for mine, function in zip(losses, (captured, sides[1][2]), strict=True):
            mine.append(function(x, y).detach())
    return captured, sides, losses


def assert_trained_alike(sides, losses, tolerance=TOLERANCE):
    (model, optimizer, _), (twin, other, _) = sides
    networks.assert_close(losses[0], losses[1], tolerance)
    networks.assert_close(list(model.state_dict().values()), list(twin.state_dict().values()), tolerance)
    networks.assert_close(networks.optimizer_state(optimizer), networks.optimizer_state(other), tolerance)
    assert all(p.grad is None for p in model.parameters())


def test_optimizers_train_as_in_eager():
    """Each trains a layer of its own, all in one step: one graph is lowered."""
    models = nn.ModuleDict({name: nn.Linear(networks.Mlp.example[1], 4) for name in OPTIMIZERS})
    sides, losses = [], []
    for networks_of, wrap in ((models, ms.step), (copy.deepcopy(models), lambda step, **_: step)):
        optimizers = {name: make(networks_of[name].parameters()) for name, make in OPTIMIZERS.items()}

        def step(x, y, networks_of=networks_of, optimizers=optimizers):
            losses = []
            for name, optimizer in optimizers.items():
                loss = F.cross_entropy(networks_of[name](x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(networks_of[name].parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        torch.manual_seed(1)
        run = wrap(step, strict=True)
        losses.append([run(*networks.example(networks.Mlp)) for _ in range(20)])
        sides.append((networks_of, optimizers))
    for number, name in enumerate(OPTIMIZERS):
        pair = [(each[name], optimizers_of[name], None) for each, optimizers_of in sides]
        assert_trained_alike(pair, [[each[number] for each in side] for side in losses])


def test_two_runs_from_one_seed_are_bit_identical(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "0")  # both are lowered
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        torch._dynamo.reset()
        _, ((model, _, _), _), losses = train(networks.Mlp, OPTIMIZERS["adam"], 4)
        runs.append((list(model.state_dict().values()), losses[0]))
    for a, b in zip(*(torch.utils._pytree.tree_leaves(run) for run in runs), strict=True):
        assert torch.equal(a, b)


def test_evaluation_checkpoints_and_schedulers_in_between():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    model(networks.example(networks.ResNet)[0])
    twin = copy.deepcopy(model)
    results = []
    for network, wrap in ((model, ms.step), (twin, lambda f: f)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def step(x, y, network=network, optimizer=optimizer):
            network.train()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = wrap(step)
        saved = None
        for i in range(8):
            x, y = networks.example(networks.ResNet)
            run(x, y)
            scheduler.step()
            if i == 3:
                saved = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
            if i == 5:
                network.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            network.eval()
            with torch.no_grad():
                results.append(network(x))
    networks.assert_close(results[:8], results[8:], TOLERANCE)


def test_a_result_stays_as_it_was():
    _, _, losses = train(networks.Mlp, OPTIMIZERS["sgd"], 5)
    assert len({loss.item() for loss in losses[0]}) == 5


def test_versions_of_changed_parameters_grow():
    captured, ((model, _, _), _), _ = train(networks.Mlp, OPTIMIZERS["sgd"], 4)
    weight = model.layers[0].weight
    kept = (weight * weight).sum()
    captured(*networks.example(networks.Mlp))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_explain_a_step():
    captured, _, _ = train(networks.Mlp, OPTIMIZERS["adam"], 3)
    text = str(ms.explain(captured))
    assert "test_step.py" in text or "networks.py" in text
    data = ms.explain(captured).to_dict()
    (program,) = data["programs"]
    assert program["phase"] == "step"
    assert program["memory_bytes"]["state"] > 0


def test_a_view_of_what_the_compiler_lays_out_otherwise():
    """As caches of keys and values begin: ``cat`` with nothing keeps, in the compiler, the order of what follows."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        keys = torch.cat([torch.tensor([]), (x @ weight).view(2, 3, 2, 2).transpose(1, 2)], dim=-2)
        loss = keys.transpose(-2, -1).mul(1.0).reshape(4, 2, 3).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(2, 3, 4)
    captured = ms.step(step, strict=True)
    before = weight.detach().clone()
    losses = [captured(x).item() for _ in range(3)]
    with torch.no_grad():
        weight.copy_(before)
    assert losses == pytest.approx([step(x).item() for _ in range(3)], rel=1e-5)


def test_a_step_that_computes_nothing():
    with pytest.raises(CaptureError, match="computes nothing with tensors"):
        ms.step(lambda x: x, strict=True)(torch.ones(1))


@pytest.mark.parametrize("nested", [{"enabled": False}, {"dtype": torch.float16}])
def test_autocast_within_that_of_the_caller_holds(nested):
    """The graph has its casts: nothing is cast once more when it is lowered, nor when it runs."""
    torch._dynamo.reset()
    convolution, linear, other = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*convolution.parameters(), *linear.parameters(), *other.parameters()], 0.0)

    def step(x):
        outer = linear(x.mean((2, 3)) @ torch.ones(3, 4))
        with torch.autocast("cpu", **nested):
            inner = convolution(x), other(torch.ones(2, 4)), x[0, 0] @ x[0, 1]
        (outer.float().square().mean() + sum(each.float().square().mean() for each in inner)).backward()
        optimizer.step()
        gradients = [parameter.grad.clone() for parameter in (*linear.parameters(), *other.parameters())]
        optimizer.zero_grad()
        return outer, *inner, *gradients

    captured, x = ms.step(step, strict=True), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [each.detach() for each in step(x)]
        for _ in range(4):
            for ours, theirs in zip(captured(x), expected, strict=True):
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
            exact = captured(x)[3].float() - (x[0, 0].double() @ x[0, 1].double()).float()
            assert exact.abs().max() < (1e-4 if "enabled" in nested else 1e-2)
    assert captured.graphs


def test_a_copy_of_a_step_trains_the_copied_object():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(3, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            self.step = ms.step(self.train, strict=True)

        def train(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

    torch._dynamo.reset()
    trainer, x = Trainer(), torch.randn(4, 3)
    for _ in range(3):
        trainer.step(x)
    other = copy.deepcopy(trainer)
    weight, other_weight = trainer.model.weight.clone(), other.model.weight.clone()
    assert torch.equal(weight, other_weight)
    for _ in range(3):
        other.step(x)
    assert torch.equal(trainer.model.weight, weight)
    assert not torch.equal(other.model.weight, other_weight)
    assert len(other.step.graphs) == 1


def yields(x):
    yield x


async def awaits(x):
    return x


@pytest.mark.parametrize(
    ("function", "arguments", "told"),
    [
        (yields, {}, "yields yields or awaits"),
        (awaits, {}, "awaits yields or awaits"),
        (3, {}, "not int"),
        (None, {"strict": "yes"}, "strict='yes'"),
        (None, {"copy_outputs": 1}, "copy_outputs=1"),
    ],
)
def test_what_is_no_step_is_refused(function, arguments, told):
    with pytest.raises(ms.ArgumentError, match=told):
        ms.step(function, **arguments)
