"""Idioms of people's training steps, each as short as it is found, with what becomes of it: ``docs/idioms.md``."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import sys
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import millstream as ms

logger = logging.getLogger("idioms")
Pair = namedtuple("Pair", "loss logits")


class World:
    """What steps use; made anew for each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)
        self.x = torch.randn(4, 3)
        self.y = torch.tensor([0, 1, 1, 0])

    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), self.y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss


Made = tuple[Callable[..., Any], Callable[[], Any]]
"""A step of a batch ``x``, and what gives what it has left in Python's objects."""


@dataclass(frozen=True)
class Idiom:
    """A row of the table.

    Attributes:
        title: What it is, as the page says it.
        make: Makes it.
        reason: Why it is not captured, as the warning says it; empty for what is.
        remedy: What to do, as the page says it.
        follow: Makes the same as the remedy says.
    """

    title: str
    make: Callable[[World], Made]
    reason: str = ""
    remedy: str = ""
    follow: Callable[[World], Made] | None = field(default=None, compare=False)


IDIOMS: list[Idiom] = []


def nothing() -> None:
    """What a step leaves that changes no object."""


def captured(title: str) -> Callable[[Callable[[World], Made]], None]:
    """Register an idiom that is captured."""
    return lambda make: IDIOMS.append(Idiom(title, make))


def warned(title: str, reason: str, remedy: str) -> Callable[[Callable[[World], tuple[Any, Any, Any]]], None]:
    """Register an idiom that is not, with its remedy; what makes it gives both steps."""

    def register(make: Callable[[World], tuple[Any, Any, Any]]) -> None:
        def first(w: World) -> Made:
            step, _, left = make(w)
            return step, left

        def second(w: World) -> Made:
            _, step, left = make(w)
            return step, left

        IDIOMS.append(Idiom(title, first, reason, remedy, second))

    return register


# --- numbers that are kept --------------------------------------------------------------------------------------------


@captured('`losses.append(loss.item())`, `history["loss"].append(float(loss))` of a dict or a `defaultdict`')
def _(w):
    losses, history = [], defaultdict(list)

    def step(x):
        loss = w.train(x)
        losses.append(loss.item())
        history["loss"].append(float(loss.detach()))
        return loss

    return step, lambda: (losses, history["loss"])


@captured('`history.setdefault("loss", []).append(loss.item())`')
def _(w):
    history = defaultdict(list, loss=[])

    def step(x):
        loss = w.train(x)
        history.setdefault("loss", []).append(float(loss.detach()))
        return loss

    return step, lambda: history["loss"]


@captured("`total += loss.item() * x.size(0)`, `count += len(x)`, and their quotient")
def _(w):
    meter = types.SimpleNamespace(total=0.0, count=0, average=0.0)

    def step(x):
        loss = w.train(x)
        meter.total += loss.item() * x.size(0)
        meter.count += len(x)
        meter.average = meter.total / meter.count
        return loss

    return step, lambda: vars(meter)


@captured("`correct += (out.argmax(1) == y).sum().item()`")
def _(w):
    seen = {"correct": 0}

    def step(x):
        seen["correct"] += (w.model(x).argmax(1) == w.y).sum().item()
        return w.train(x)

    return step, lambda: seen


@captured("`running = 0.9 * running + 0.1 * loss.item()`")
def _(w):
    state = {"running": 0.0}

    def step(x):
        loss = w.train(x)
        state["running"] = 0.9 * state["running"] + 0.1 * loss.item()
        return loss

    return step, lambda: state


@captured("`predictions.extend(out.argmax(1).tolist())`")
def _(w):
    predictions = []

    def step(x):
        predictions.extend(w.model(x).argmax(1).tolist())
        return w.train(x)

    return step, lambda: predictions


@captured("`meters.update(loss.item(), n)` of an `AverageMeter`")
def _(w):
    class AverageMeter:
        def __init__(self):
            self.val = self.sum = self.count = self.avg = 0

        def update(self, value, n=1):
            self.val = value
            self.sum += value * n
            self.count += n
            self.avg = self.sum / self.count

    meter = AverageMeter()

    def step(x):
        loss = w.train(x)
        meter.update(loss.item(), x.size(0))
        return loss

    return step, lambda: vars(meter)


@captured('`metrics = {"loss": loss.item(), "accuracy": ...}`, returned')
def _(w):
    def step(x):
        accuracy = (w.model(x).argmax(1) == w.y).float().mean().item()
        loss = w.train(x)
        return {"loss": loss.item(), "accuracy": accuracy, "rounded": round(loss.item(), 3)}

    return step, nothing


@captured('`math.exp(loss.item())`, `f"{100 * accuracy:.1f}%"`, `torch.clamp(loss, max=1.0)`')
def _(w):
    def step(x):
        loss = w.train(x)
        return math.exp(loss.item()), f"{100 * loss.item():.1f}%", torch.clamp(loss, max=1.0)

    return step, nothing


@captured("`history.append(x.shape)`, `rows.append(x.size(0))`")
def _(w):
    shapes, rows = [], []

    def step(x):
        shapes.append(tuple(x.shape))
        rows.append(x.size(0))
        return w.train(x)

    return step, lambda: (shapes, rows)


@captured('`kept["loss"] = loss.detach()`: tensors kept in a dict')
def _(w):
    kept = {}

    def step(x):
        loss = w.train(x)
        kept["loss"] = loss.detach()
        return loss

    return step, lambda: kept


# --- text -------------------------------------------------------------------------------------------------------------


@captured('`print(f"step {i}: loss {loss.item():.4f}")` every n steps')
def _(w):
    state = {"i": 0}

    def step(x):
        loss = w.train(x)
        if state["i"] % 2 == 0:
            print(f"step {state['i']}: loss {loss.item():.4f}")  # noqa: T201
        state["i"] += 1
        return loss

    return step, lambda: state


@captured('`"%.4f" % loss`, `"{:.3f}".format(loss.item())`, `print(loss)`')
def _(w):
    def step(x):
        loss = w.train(x)
        print("%.4f" % loss.detach(), "{:.3f}".format(loss.item()))  # noqa: T201, UP031, UP032
        print(loss)  # noqa: T201
        return loss

    return step, nothing


@captured('`logger.info("loss %.3f", loss)`, `sys.stdout.write(...)`')
def _(w):
    def step(x):
        loss = w.train(x)
        logger.warning("loss %.3f", loss)
        sys.stdout.write(f"{loss.item():.2f}\n")
        return loss

    return step, nothing


@captured('`print(" | ".join(f"{k}: {v:.3f}" for k, v in metrics.items()))`')
def _(w):
    def step(x):
        loss = w.train(x)
        metrics = {"loss": loss.item(), "double": 2 * loss.item()}
        print(" | ".join(f"{k}: {v:.3f}" for k, v in metrics.items()))  # noqa: T201
        return loss

    return step, nothing


@warned(
    '`file.write(json.dumps({"loss": loss.item()}))`',
    "makes a plain number of a tensor's value",
    '`ms.callback(write, {"loss": loss.item()})`, where `write`, outside of the step, does that',
)
def _(w):
    lines = []

    def write(row):
        lines.append(json.dumps({name: round(value, 4) for name, value in row.items()}))

    def step(x):
        loss = w.train(x)
        lines.append(json.dumps({"loss": round(loss.item(), 4)}))
        return loss

    def follow(x):
        loss = w.train(x)
        ms.callback(write, {"loss": loss.item()})
        return loss

    return step, follow, lambda: lines


# --- checks and branches ----------------------------------------------------------------------------------------------


@captured("`if not math.isfinite(loss.item()): sys.exit(1)`")
def _(w):
    def step(x):
        loss = w.train(x)
        if not math.isfinite(loss.item()):
            print("stopping")  # noqa: T201
            sys.exit(1)
        return loss

    return step, nothing


@captured('`assert not torch.isnan(loss)`, `assert loss.item() < 1e4, f"..."`')
def _(w):
    def step(x):
        loss = w.train(x)
        assert not torch.isnan(loss)
        assert loss.item() < 1e4, f"{loss.item()} is large"
        return loss

    return step, nothing


@captured("`if torch.isnan(loss).any() or torch.isinf(loss).any(): raise ValueError(...)`")
def _(w):
    def step(x):
        loss = w.train(x)
        if torch.isnan(loss).any() or torch.isinf(loss).any():
            raise ValueError("no number")
        return loss

    return step, nothing


@captured("`if loss.item() > limit: print(...)`, `logger.warning(...)`")
def _(w):
    def step(x):
        loss = w.train(x)
        if loss.item() > 0.1:
            print(f"large: {loss.item():.4f}")  # noqa: T201
        return loss

    return step, nothing


@captured("`if i % n == 0:`, `if i < warmup:`, `if epoch > 2:` by numbers and arguments")
def _(w):
    state = {"i": 0}

    def step(x):
        state["i"] += 1
        loss = w.train(x)
        return loss * 2 if state["i"] < 3 else loss

    return step, lambda: state


@captured("`if loss.item() < best: best = loss.item()`")
def _(w):
    state = {"best": float("inf")}

    def step(x):
        loss = w.train(x)
        if loss.item() < state["best"]:
            state["best"] = loss.item()
        return loss

    return step, lambda: state


@captured("`if loss > 3: loss = loss / 2`, by a tensor or by `.item()`; `if loss < best: best.copy_(loss)`")
def _(w):
    best = torch.tensor(0.7)

    def step(x):
        loss = w.train(x)
        if loss < best:
            best.copy_(loss.detach())
        if loss.item() > 0.6:
            loss = loss / 2
        return loss

    return step, best.tolist


@captured("`if not torch.isfinite(loss): print(...); skipped += 1; return loss`, `if norm.isfinite(): opt.step()`")
def _(w):
    state = {"skipped": 0}

    def step(x):
        w.opt.zero_grad()
        loss = (w.model(x) + 1).log().sum()
        if not torch.isfinite(loss):
            state["skipped"] += 1
            return loss
        loss.backward()
        if nn.utils.clip_grad_norm_(w.model.parameters(), 1.0).isfinite():
            w.opt.step()
        return loss

    return step, lambda: state


@warned(
    "`out[mask]`, `mask.nonzero()` of a mask that depends on the batch",
    "shape of a result depends on values",
    "`torch.where`, or a mask that multiplies",
)
def _(w):
    def step(x):
        return x[x > 0].sum()

    def follow(x):
        return (x * (x > 0)).sum()

    return step, follow, nothing


# --- arrays, clocks, random numbers -----------------------------------------------------------------------------------


@captured("`preds.extend(out.detach().cpu().numpy())`, `float(loss.detach().numpy())`, `(pred == y.numpy()).mean()`")
def _(w):
    preds, losses = [], []

    def step(x):
        w.train(x)
        out = w.model(x).detach().cpu().numpy()
        preds.extend(out.argmax(1))
        losses.append(float(out.mean()))
        return (out.argmax(axis=1) == w.y.clone().numpy()).mean(), f"{out.mean():.2f}"

    return step, lambda: ([int(each) for each in preds], losses)


@warned("`x * float(out.detach().numpy().mean())`", "computes with a number of a", "`x * out.detach().mean()`")
def _(w):
    def step(x):
        return w.train(x * float(w.model(x).detach().numpy().mean()))

    def follow(x):
        return w.train(x * w.model(x).detach().mean())

    return step, follow, nothing


@captured("`start = time.time()` ... `times.append(time.time() - start)`, shown, and `end = time.time()`")
def _(w):
    times, state = [], {"end": time.time()}

    def step(x):
        start = time.perf_counter()
        loss = w.train(x)
        times.append(time.perf_counter() - start)
        print(f"{(time.time() - state['end']) * 1e-9:.1f} s")  # noqa: T201
        state["end"] = time.time()
        return loss

    return step, lambda: len(times)


@captured("`lam = np.random.beta(a, a)`; `x = lam * x + (1 - lam) * x.flip(0)`")
def _(w):
    def step(x):
        lam = np.random.beta(0.2, 0.2)
        return w.train(lam * x + (1 - lam) * x.flip(0)), lam

    return step, random.getstate


@captured("`if random.random() < p:`, a graph for each way")
def _(w):
    def step(x):
        return w.train(x if random.random() < 0.5 else x * random.uniform(0.5, 2))

    return step, random.getstate


@captured("`x[np.random.permutation(n)]`, `random.shuffle(order)`, `torch.from_numpy(rng.normal(size=...))`")
def _(w):
    rng = np.random.default_rng(0)

    def step(x):
        noise = torch.from_numpy(rng.normal(size=(4, 3)).astype(np.float32))
        order = list(range(4))
        random.shuffle(order)
        first = x[random.sample(range(4), 2)].sum()
        return w.train(x[np.random.permutation(4)] + noise[order]) + first

    return step, lambda: (rng.random(), random.getstate())


@captured("`torch.from_numpy(self.weights)`, `x[:, self.columns]`: NumPy arrays that an object keeps")
def _(w):
    kept = types.SimpleNamespace(weights=np.array([1, 2, 4], np.float32), columns=np.array([2, 0, 1]))

    def step(x):
        loss = w.train(x[:, kept.columns] * torch.from_numpy(kept.weights) + torch.tensor(np.linspace(0, 1, 3)).float())
        ms.callback(kept.weights.fill, loss)
        return loss

    return step, lambda: [*kept.weights]


@warned("`i = random.randint(0, n)`; `x[:, i : i + k]`", "needs the very value", "draw outside, and pass the part")
def _(w):
    def step(x):
        i = random.randint(0, 20) // 10
        return w.train(x * x[:, i : i + 1])

    def follow(x):
        return w.train(x * x[:, 1:2])

    return step, follow, nothing


@captured(
    "`torch.rand`, `torch.randn_like`, `F.dropout`, `torch.randperm(n)`, `torch.distributions.Beta(...).sample()`"
)
def _(w):
    def step(x):
        order = torch.randperm(x.size(0))
        lam = torch.distributions.Beta(1.0, 1.0).sample()
        mixed = lam * x + (1 - lam) * x[order]
        return w.train(F.dropout(mixed + 0.1 * torch.randn_like(x), 0.5) * torch.rand(()))

    return step, nothing


# --- batches and results ----------------------------------------------------------------------------------------------


@captured("dicts, named tuples, `SimpleNamespace`s made within the step")
def _(w):
    def step(x):
        batch = types.SimpleNamespace(x=x, pair=Pair(x * 2, x + 1), rest=OrderedDict(a=x))
        return w.train(batch.x + batch.pair.loss * 0 + batch.rest["a"] * 0)

    return step, nothing


@captured("`Pair(loss, logits)`, lists and dicts of tensors returned; `dataclasses.asdict(batch)`, `copy.deepcopy(x)`")
def _(w):
    @dataclass
    class Batch:
        x: torch.Tensor
        weight: float = 1.0

    def step(x):
        batch = Batch(x)
        fields = dataclasses.asdict(batch)
        fields["x"] += 1
        loss = w.train(fields["x"] * fields["weight"])
        return Pair(loss, w.model(x).detach()), {"loss": loss, "all": [loss, None]}, batch.x

    return step, nothing


@captured("`x = x.to(device, non_blocking=True)`, `y = y.long()`, `{k: v.to(device) for k, v in batch.items()}`")
def _(w):
    def step(x):
        batch = {name: value.to("cpu", non_blocking=True) for name, value in {"x": x}.items()}
        return w.train(batch["x"].float())

    return step, nothing


@captured("`F.one_hot(y, 2)`, `label_smoothing=0.1`, `weight=torch.tensor([...])`")
def _(w):
    weight = torch.tensor([1.0, 2.0])

    def step(x):
        out = w.model(x)
        loss = F.cross_entropy(out, w.y, weight=weight, label_smoothing=0.1)
        loss = loss + F.binary_cross_entropy_with_logits(out, F.one_hot(w.y, 2).float())
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


# --- training ---------------------------------------------------------------------------------------------------------


@captured("`nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, its result logged")
def _(w):
    norms = []

    def step(x):
        F.cross_entropy(w.model(x), w.y).backward()
        norms.append(nn.utils.clip_grad_norm_(w.model.parameters(), 1.0).item())
        w.opt.step()
        w.opt.zero_grad(set_to_none=True)

    return step, lambda: norms


@captured("gradients accumulated: `(loss / n).backward()`; `if (i + 1) % n == 0: opt.step()`")
def _(w):
    state = {"i": 0}

    def step(x):
        (F.cross_entropy(w.model(x), w.y) / 2).backward()
        if (state["i"] + 1) % 2 == 0:
            w.opt.step()
            w.opt.zero_grad()
        state["i"] += 1

    return step, lambda: state


@captured('`scheduler.step()`, `scheduler.get_last_lr()[0]` and `opt.param_groups[0]["lr"]` logged')
def _(w):
    scheduler = torch.optim.lr_scheduler.StepLR(w.opt, 2)
    rates = []

    def step(x):
        rates.append(w.opt.param_groups[0]["lr"])
        loss = w.train(x)
        scheduler.step()
        print(f"{scheduler.get_last_lr()[0]:.1e}")  # noqa: T201
        return loss

    return step, lambda: rates


@captured('`for group in opt.param_groups: group["lr"] = base * min(1, i / warmup)`')
def _(w):
    state = {"i": 0}

    def step(x):
        state["i"] += 1
        for group in w.opt.param_groups:
            group["lr"] = 0.1 * state["i"] / 10
        return w.train(x)

    return step, lambda: state


@captured("an average of weights: `for p, q in zip(...): q.lerp_(p, 0.1)`")
def _(w):
    mean = nn.Linear(3, 2)

    def step(x):
        loss = w.train(x)
        with torch.no_grad():
            for p, q in zip(w.model.parameters(), mean.parameters(), strict=True):
                q.lerp_(p, 0.1)
        return loss

    return step, lambda: [*mean.parameters()]


@captured("`target.load_state_dict(model.state_dict())`")
def _(w):
    target = nn.Linear(3, 2)

    def step(x):
        loss = w.train(x)
        target.load_state_dict(w.model.state_dict())
        return loss

    return step, lambda: [*target.parameters()]


@captured("`model.train()`, `model.eval()`, `with torch.no_grad():`, `@torch.no_grad()`")
def _(w):
    @torch.no_grad()
    def evaluate(x):
        w.model.eval()
        return (w.model(x).argmax(1) == w.y).float().mean()

    def step(x):
        accuracy = evaluate(x)
        w.model.train()
        return w.train(x), accuracy

    return step, nothing


@captured("`with torch.autocast(...)`, a `GradScaler` that is off")
def _(w):
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(w.model(x).float(), w.y)
        scaler.scale(loss).backward()
        scaler.step(w.opt)
        scaler.update()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("gradient penalty: `torch.autograd.grad(out.sum(), x, create_graph=True)`")
def _(w):
    def step(x):
        x = x.detach().requires_grad_()
        out = torch.tanh(w.model(x))
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("two optimizers in turn, `critic(out.detach())` for the first")
def _(w):
    critic = nn.Linear(2, 1)
    opt = torch.optim.Adam(critic.parameters(), 0.01)

    def step(x):
        out = w.model(x)
        opt.zero_grad()
        loss = critic(out.detach()).mean()
        loss.backward()
        opt.step()
        w.opt.zero_grad()
        own = -critic(out).mean()
        own.backward()
        w.opt.step()
        return loss, own

    return step, lambda: [*critic.parameters()]


@captured("`sum(p.numel() for p in model.parameters())`, `sum(p.abs().sum() for p in ...)` in the loss")
def _(w):
    def step(x):
        count = sum(p.numel() for p in w.model.parameters())
        loss = F.cross_entropy(w.model(x), w.y) + 1e-3 * sum(p.abs().sum() for p in w.model.parameters()) / count
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("`total = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}`")
def _(w):
    def step(x):
        F.cross_entropy(w.model(x), w.y).backward()
        norms = {n: p.grad.norm().item() for n, p in w.model.named_parameters() if p.grad is not None}
        w.opt.step()
        w.opt.zero_grad()
        return norms

    return step, nothing


@captured("hooks that keep activations: `layer.register_forward_hook(...)`")
def _(w):
    kept = {}
    w.model.register_forward_hook(lambda module, args, out: kept.update(out=out.detach()))
    return w.train, lambda: kept


@captured("a memory bank: `bank[(ptr + torch.arange(n)) % size] = features`, where `ptr` is a tensor")
def _(w):
    bank, ptr = torch.zeros(8, 2), torch.zeros((), dtype=torch.long)

    def step(x):
        loss = w.train(x)
        bank[(ptr + torch.arange(4)) % 8] = w.model(x).detach()
        ptr.add_(4).remainder_(8)
        return loss

    return step, lambda: (bank, ptr)


@captured("a buffer as a flag: `if not self.initialized: self.mean.copy_(x.mean(0)); self.initialized.fill_(True)`")
def _(w):
    initialized, mean = torch.tensor(False), torch.zeros(3)

    def step(x):
        if not initialized:
            mean.copy_(x.unique(dim=0)[0])
            initialized.fill_(True)
        return w.train(x - mean)

    return step, lambda: (initialized, mean)


@captured("`metrics.update(n=x.size(0), loss=loss.item())` of a dict")
def _(w):
    seen = {}

    def step(x):
        loss = w.train(x)
        seen.update(n=x.size(0), loss=loss.item())
        return loss

    return step, lambda: seen


@captured("activation checkpointing: `checkpoint(block, x, use_reentrant=False)`")
def _(w):
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return lambda x: w.train(checkpoint(block, x, use_reentrant=False)), lambda: [*block.parameters()]


@captured("`loss_dict = {...}`, `loss = sum(loss_dict.values())`, each item logged")
def _(w):
    logged = []

    def step(x):
        out = w.model(x)
        loss_dict = {"classes": F.cross_entropy(out, w.y), "size": 0.1 * out.square().mean()}
        loss = sum(loss_dict.values())
        loss.backward()
        w.opt.step()
        w.opt.zero_grad(set_to_none=True)
        logged.append({name: value.item() for name, value in loss_dict.items()})
        return loss

    return step, lambda: logged


@captured("distillation: `with torch.no_grad(): teacher(x)`, `F.kl_div(F.log_softmax(out / t, 1), ...)`")
def _(w):
    teacher = nn.Linear(3, 2)

    def step(x):
        with torch.no_grad():
            target = F.softmax(teacher(x) / 2, 1)
        loss = F.kl_div(F.log_softmax(w.model(x) / 2, 1), target, reduction="batchmean") * 4
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("an optimizer in a wrapper that counts its steps, as trainers hand it out")
def _(w):
    class Counting:
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0

        def step(self):
            self.optimizer.step()
            self.steps += 1

    opt = Counting(w.opt)

    def step(x):
        loss = F.cross_entropy(w.model(x), w.y)
        loss.backward()
        opt.step()
        opt.optimizer.zero_grad()
        return loss

    return step, lambda: opt.steps


@captured("`nn.utils.clip_grad_value_(model.parameters(), 0.5)`, `p.grad.mul_(0.1)` of some parameters")
def _(w):
    def step(x):
        loss = F.cross_entropy(w.model(x), w.y)
        loss.backward()
        nn.utils.clip_grad_value_(w.model.parameters(), 0.5)
        w.model.bias.grad.mul_(0.1)
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("contrastive losses: `F.normalize(out) @ F.normalize(other).T`, `F.cross_entropy(sims, torch.arange(n))`")
def _(w):
    def step(x):
        sims = F.normalize(w.model(x), dim=1) @ F.normalize(w.model(x * 0.9), dim=1).T / 0.1
        loss = F.cross_entropy(sims, torch.arange(x.size(0), device=x.device))
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("masks that depend on no input: `sims[~torch.eye(n, dtype=torch.bool)]`, `torch.arange(n)[mask].tolist()`")
def _(w):
    def step(x):
        n = len(x)
        out = F.normalize(w.model(x), dim=1)
        mask = torch.eye(n, dtype=torch.bool)
        mask[0, 1:3] = True
        columns = torch.arange(3)
        loss = (out @ out.T)[~mask].logsumexp(0) + x[:, columns[columns != 1].tolist()].sum()
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured(
    "masks and sequences: `torch.tril(torch.ones(n, n)).bool()`, `masked_fill(~mask, float('-inf'))`, `ignore_index`"
)
def _(w):
    def step(x):
        mask = torch.tril(torch.ones(len(x), len(x))).bool()
        weights = (x @ x.T).masked_fill(~mask, float("-inf")).softmax(-1)
        loss = F.cross_entropy(w.model(weights @ x), w.y.masked_fill(w.y == 0, -100), ignore_index=-100)
        loss.backward()
        w.opt.step()
        w.opt.zero_grad()
        return loss

    return step, nothing


@captured("`acc1, acc5 = accuracy(out, y, topk=(1, 2))` by `topk`, `eq`, `reshape(-1)`")
def _(w):
    seen = []

    def step(x):
        _, top = w.model(x).topk(2, 1)
        correct = top.t().eq(w.y.view(1, -1).expand_as(top.t()))
        seen.append([correct[:k].reshape(-1).float().sum(0).mul(100.0 / len(x)).item() for k in (1, 2)])
        return w.train(x)

    return step, lambda: seen


@captured("`nn.LSTM`, its state carried on: `h.copy_(new_h.detach())`, also between batches of a loop")
def _(w):
    lstm = nn.LSTM(3, 3)
    h, c = torch.zeros(1, 3), torch.zeros(1, 3)

    def step(x):
        out, (new_h, new_c) = lstm(x, (h, c))
        loss = w.train(out)
        h.copy_(new_h.detach())
        c.copy_(new_c.detach())
        return loss

    return step, lambda: (h, c)


@warned(
    "`window = deque(maxlen=3)`; `window.append(loss.item())`",
    "changes window",
    "`ms.callback(window.append, loss.item())`",
)
def _(w):
    window = deque(maxlen=3)

    def step(x):
        loss = w.train(x)
        window.append(loss.item())
        return loss

    def follow(x):
        loss = w.train(x)
        ms.callback(window.append, loss.item())
        return loss

    return step, follow, lambda: [*window]


@warned(
    "`counts.update(out.argmax(1).tolist())` of a `Counter`",
    "looks something up by",
    "`ms.callback(counts.update, out.argmax(1).tolist())`",
)
def _(w):
    counts = Counter()

    def step(x):
        counts.update(w.model(x).argmax(1).tolist())
        return w.train(x)

    def follow(x):
        ms.callback(counts.update, w.model(x).argmax(1).tolist())
        return w.train(x)

    return step, follow, lambda: counts


@warned(
    "`outputs.append(out.detach())`", "changes outputs", "`ms.callback(outputs.append, out.detach())`, or return it"
)
def _(w):
    outputs = []

    def step(x):
        outputs.append(w.model(x).detach())
        return w.train(x)

    def follow(x):
        ms.callback(outputs.append, w.model(x).detach())
        return w.train(x)

    return step, follow, lambda: outputs
