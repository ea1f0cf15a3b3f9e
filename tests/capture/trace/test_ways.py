"""Branches on tensors' values: both ways in one graph, and everything is as in eager PyTorch."""

import contextlib
import copy
import io
import math
import os
import random

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.workarounds import without
from millstream.capture.step.step import Step
from millstream.errors import CaptureError
from tests.capture.worlds import assert_same, interpret

NAN, INF = float("nan"), float("inf")


class Trainer:
    def __init__(self, optimizer="adamw"):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
        self.average = copy.deepcopy(self.net)
        self.table = nn.Embedding(6, 4)
        self.ema = torch.zeros(())
        self.best = torch.full((), 10.0)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        self.opt = kind([*self.net.parameters(), *self.table.parameters()], 0.02)
        self.skipped = self.done = 0

    def loss(self, x):
        return (self.net(x) + self.table(torch.tensor([1, 5, 1])).mean()).square().mean()

    def train(self, loss):
        loss.backward()
        self.opt.step()


def skips_the_update(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
    if torch.isfinite(norm):
        self.opt.step()
    return loss


def leaves_early(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if not torch.isfinite(loss):
        return loss
    self.train(loss)
    return loss


def leaves_early_without_gradients(self, x):
    loss = self.loss(x)
    if math.isfinite(loss.item()):
        self.train(loss)
        self.opt.zero_grad()
    return loss


def says_so(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if not loss.isfinite():
        print(f"skipped a batch: {loss.item()}")  # noqa: T201
        self.opt.zero_grad()
        return loss
    print(f"loss {loss.item():.4f}")  # noqa: T201
    self.train(loss)
    return loss


def returns_what_it_says(self, x):
    self.opt.zero_grad()
    loss = self.loss(x).nan_to_num()
    if loss > 0.5:
        self.skipped += 1
        loss = loss / 2
        text = f"{loss.item():.3f}"
    elif loss > 0.1:
        self.done += 1
        print("in between")  # noqa: T201
        loss = loss * 3
        text = f"now {loss.item():.2f}"
    else:
        text = f"as it is: {loss.item():.1f}"
    self.train(loss)
    return loss.item(), text, (loss * 2).item()


def counts(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if torch.isnan(loss) or torch.isinf(loss):
        self.skipped += 1
    else:
        self.train(loss)
        self.done += 1
    return loss


def scales(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if loss > 1:
        loss = loss / loss.detach().sqrt()
    elif loss < 0.3:
        loss = loss * 2 + self.table.weight.abs().mean()
    loss = torch.nan_to_num(loss)
    self.train(loss)
    return loss


def keeps_the_best(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if loss < self.best:
        self.best.copy_(loss.detach())
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mine.copy_(its)
    self.train(loss.nan_to_num())
    return self.best


def averages(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    with torch.no_grad():
        if self.ema == 0:
            self.ema.add_(loss.detach().nan_to_num())
        else:
            self.ema.lerp_(loss.detach().nan_to_num(), 0.1)
    self.train(loss.nan_to_num())
    return self.ema.clone()


def clips_by_hand(self, x):
    self.opt.zero_grad()
    loss = self.loss(x).nan_to_num()
    loss.backward()
    norm = sum(p.grad.square().sum() for p in self.net.parameters()).sqrt()
    if norm > 0.5:
        for p in self.net.parameters():
            p.grad.mul_(0.5 / norm)
    self.opt.step()
    return norm


def returns_numbers(self, x):
    self.opt.zero_grad()
    loss = self.loss(x)
    if not torch.isfinite(loss):
        loss = torch.zeros_like(loss)
    else:
        self.train(loss)
    return loss.item(), {"loss": loss}


STEPS = [
    skips_the_update, leaves_early, leaves_early_without_gradients, says_so, returns_what_it_says, counts,
    scales, keeps_the_best, averages, clips_by_hand, returns_numbers,
]  # fmt: skip


def batches(number):
    torch.manual_seed(1)
    scales = [1, 3, NAN, 0.1, 2, INF, NAN, 0.5, 1, 4]
    made = []
    for scale in scales[:number]:
        x = torch.randn(3, 4)
        x[0, 0] = scale if not math.isfinite(scale) else x[0, 0] * scale
        made.append(x * (scale if math.isfinite(scale) else 1))
    return made


def everything(trainer):
    """What a call may change."""
    tensors = [*trainer.net.state_dict().values(), *trainer.average.state_dict().values(), trainer.ema, trainer.best]
    states = [state for state in trainer.opt.state.values() for state in state.values()]
    gradients = [p.grad for group in trainer.opt.param_groups for p in group["params"]]
    return [each if each is None else each.clone() for each in [*tensors, *states, *gradients]]


def compare(function, make, how, number=10):
    eager, captured = Trainer(), Trainer()
    step = make(lambda x: function(captured, x))
    for x in batches(number):
        torch.manual_seed(3)
        wanted = function(eager, x)
        torch.manual_seed(3)
        got = step(x)
        assert_same(got, wanted, **how)
        for one, other in zip(everything(captured), everything(eager), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, equal_nan=True, check_dtype=False, **how)
        assert (captured.skipped, captured.done) == (eager.skipped, eager.done)
    return step


@pytest.mark.parametrize("function", STEPS, ids=lambda each: each.__name__)
def test_both_ways_are_as_in_eager(function, capsys):
    step = compare(function, lambda each: Step(each, build=interpret, strict=True), {})
    assert 1 <= len(step.graphs) <= 3
    assert all("both ways of the branch at" in each.effects.notes[0] for each in step.graphs)
    said = capsys.readouterr().out.splitlines()
    assert sorted(said[::2]) == sorted(said[1::2])


class World:
    """What random programs use."""

    def __init__(self):
        torch.manual_seed(0)
        self.state = {name: torch.randn(4, 3) for name in "abc"}
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.count = 0


UPDATES = ("add_", "mul_", "copy_", "sub_")
VIEWS = (lambda t: t[1:3], lambda t: t[:2], lambda t: t.t(), lambda t: t.view(-1), lambda t: t[:, 1:])
PURE = (torch.add, torch.mul, torch.maximum, lambda one, other: (one + other).relu(), lambda one, _: one.clone())
SHAPES = [view(torch.empty(4, 3)).shape for view in VIEWS]


def random_program(draw, names, depth=0):
    """Statements, and the names that hold tensors after them, with their shapes."""
    names = dict(names)
    program = []
    for _ in range(draw.randint(1, 3) if depth else draw.randint(3, 6)):
        kind = draw.choice(["update", "update", "view", "new", "if", "if", "count", "print", "train"])
        name = draw.choice([*names])
        alike = [each for each in names if names[each] == names[name]]
        if kind == "if" and depth < 2:
            then, one = random_program(draw, names, depth + 1)
            other, two = random_program(draw, names, depth + 1) if draw.random() < 0.6 else ([], names)
            program.append(("if", name, draw.choice([-2.0, 0.0, 2.0, NAN]), then, other))
            names = {each: one[each] for each in one if two.get(each) == one[each]}
        elif kind == "update":
            program.append(("update", name, draw.choice(UPDATES), draw.choice(alike)))
        elif kind == "view" and names[name] == (4, 3):
            number = draw.randrange(len(VIEWS))
            program.append(("view", f"v{number}", name, number))
            names[f"v{number}"] = SHAPES[number]
        elif kind == "new":
            new = f"n{draw.randint(0, 2)}"
            program.append(("new", new, draw.randrange(len(PURE)), name, draw.choice(alike)))
            names[new] = names[name]
        elif kind in ("count", "print", "train"):
            program.append((kind, name))
    return program, names


def execute(program, world, found):
    for kind, name, *how in program:
        if kind == "if":
            bound, then, other = how
            if found[name].detach().sum() > bound:
                execute(then, world, found)
            else:
                execute(other, world, found)
        elif kind == "update":
            with torch.no_grad():
                getattr(found[name], how[0])(found[how[1]].clamp(-2, 2))
        elif kind == "view":
            found[name] = VIEWS[how[1]](found[how[0]])
        elif kind == "new":
            found[name] = PURE[how[0]](found[how[1]], found[how[2]])
        elif kind == "count":
            world.count += 1
        elif kind == "print":
            print(f"{name}: {found[name].sum().item()}")  # noqa: T201
        else:
            (found[name].detach().sum() * world.weight.square()).mean().backward()


def run_random(seed):
    """Whether a random program was captured; it is as in eager in each call."""
    draw = random.Random(seed)
    program, names = random_program(draw, dict.fromkeys("abcx", torch.Size((4, 3))))
    results = [name for name in names if name[0] in "nvx"]
    does_zero = draw.random() < 0.5

    def make(world):
        def step(x):
            if does_zero:
                world.weight.grad = None
            found = {**world.state, "x": x * 1}
            execute(program, world, found)
            number = found["x"].sum().item()
            return [found[name].clone() for name in results], number, f"{found['a'].mean().item():.3f}", number * 2

        return step

    ours, theirs = World(), World()
    captured, eager = Step(make(ours), build=interpret), make(theirs)
    for number in range(5):
        torch.manual_seed(number)
        x = torch.randn(4, 3) * (number + 1)
        outs = []
        for step, world in ((eager, theirs), (captured, ours)):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                got = step(x)
            outs.append((got, [*world.state.values()], world.weight.grad, world.count, said.getvalue()))
        assert_same(*outs)
    return captured


@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_random_branches_are_as_in_eager():
    seeds = range(int(os.environ.get("MILLSTREAM_FUZZ", "6")))
    captured = sum(bool(run_random(seed).graphs) for seed in seeds)
    assert captured >= 0.6 * len(seeds)


def test_branches_can_be_left_to_plain_python():
    trainer, x = Trainer(), batches(1)[0]
    step = Step(lambda x: skips_the_update(trainer, x), build=interpret, strict=True)
    step(x)  # which makes the optimizer's state
    with without(["branches"]), pytest.raises(CaptureError, match="branches on a tensor's value"):
        step(x)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("if x.sum() > 3: return x\nreturn None", "return results of different structure"),
        ("if x.sum() > 3: return x[:1]\nreturn x", "results of different shapes"),
        ("if x.sum() > 3: x = x + torch.rand(2)\nreturn x", "have rand"),
        ("if x.sum() > 3: x = table[y]\nreturn x", "have index"),
        ("if x.sum() > 3: return y // y.sum()\nreturn y", "have floor_divide"),
        ("while x.sum() < 100: x = x * 2\nreturn x", "branches on tensors' values more than 2 times"),
        ("if x.sum() > 3: kept.append(x)\nreturn x", r"not both captured: The step changes"),
        ("if x.sum() > 3: x = x[x > 0]\nreturn x.sum()", "not both captured: The shape of a result"),
    ],
)
def test_what_must_not_run_in_vain_is_refused(body, reason):
    held = {"torch": torch, "table": torch.randn(3), "y": torch.tensor([1, 5]), "kept": []}
    text = "\n    ".join(
        ["def step(x):", "table = held['table']; y = held['y'] * 1; kept = held['kept']; x = x * 1", *body.splitlines()]
    )
    exec(text, {"held": held, "torch": torch}, held)
    x = torch.tensor([0.5, 1.0])
    with pytest.raises(CaptureError, match=reason):
        Step(held["step"], build=interpret, strict=True)(x)


def test_lowered_both_ways_are_as_in_eager():
    def make(function):
        return ms.step(function, engine="threads", strict=True, options={"fallback_random": True})

    compare(keeps_the_best, make, {"rtol": 1e-4, "atol": 1e-5}, number=5)
