"""Each remedy that a fallback names, followed: before, the step falls back with that reason; after, it is captured."""

import contextlib
import functools
import hashlib
import itertools
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import millstream as ms
from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))


class World:
    """What steps use; made anew for each."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)
        self.x = torch.randn(6, 4)

    def finish(self, loss):
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss

    def close(self):
        pass

    def arguments(self):
        return (self.x.clone(),)


REMEDIES = {}


def remedy(reason):
    """A pair of functions that turn a world into a step: as it was, and as the remedy says."""

    def register(make):
        REMEDIES[reason] = make
        return make

    return register


@remedy("shape of a result depends on values")
def _(w):
    def masked(x):
        out = w.model(x)
        return w.finish(out[out > 0].sum())

    def multiplied(x):
        out = w.model(x)
        return w.finish((out * (out > 0)).sum())

    return masked, multiplied


@remedy("of a mask that stays the same, take the positions outside of the step")
def _(w):
    mask = torch.tensor([True, False, True, True, False, True])
    positions = mask.nonzero(as_tuple=True)
    return lambda x: w.finish(w.model(x)[mask].sum()), lambda x: w.finish(w.model(x)[positions].sum())


@remedy("branches on a tensor's value, and its two ways")
def _(w):
    def drawn(x):
        loss = w.model(x).sum()
        if loss > 0:
            loss = loss + torch.rand(())
        return w.finish(loss)

    def selected(x):
        loss = w.model(x).sum()
        return w.finish(torch.where(loss > 0, loss + torch.rand(()), loss))

    return drawn, selected


@remedy("branches on tensors' values more than")
def _(w):
    def halved(x):
        loss = w.model(x).square().sum()
        while loss > 0.01:
            loss = loss / 2
        return w.finish(loss)

    def scaled(x):
        loss = w.model(x).square().sum()
        return w.finish(torch.where(loss > 0.01, loss / loss.detach() * 0.01, loss))

    return halved, scaled


@remedy("puts an attribute on")
def _(w):
    last = {}

    def on_tensor(x):
        loss = w.model(x).sum()
        w.model[0].weight.last = loss.item()
        return w.finish(loss)

    def in_dict(x):
        loss = w.model(x).sum()
        last["0.weight"] = loss.item()
        return w.finish(loss)

    return on_tensor, in_dict


@remedy("compares the type of something")
def _(w):
    w.count = 0

    def by_type(x):
        w.count += 1
        return w.finish(w.model(x).sum() * (w.count if type(w.count) is int else 2))

    def by_instance(x):
        w.count += 1
        return w.finish(w.model(x).sum() * (w.count if isinstance(w.count, int) else 2))

    return by_type, by_instance


@remedy("makes an optimizer")
def _(w):
    def made(x):
        opt = torch.optim.SGD(w.model.parameters(), 0.1)
        w.model(x).sum().backward()
        opt.step()
        w.opt.zero_grad()

    return made, lambda x: w.finish(w.model(x).sum())


@remedy("and nobody can compare what that")
def _(w):
    digest = hashlib.sha256()

    def hashed(x):
        digest.update(b"step")
        return w.finish(w.model(x).sum())

    def called_back(x):
        ms.callback(digest.update, b"step")
        return w.finish(w.model(x).sum())

    return hashed, called_back


@remedy("has a hook on its gradient")
def _(w):
    weight = w.model[0].weight
    hooked = weight.register_hook(lambda grad: grad * 2)

    def plain(x):
        return w.finish(w.model(x).sum())

    def after_backward(x):
        loss = w.model(x).sum()
        loss.backward()
        weight.grad.mul_(2)
        w.opt.step()
        w.opt.zero_grad()
        return loss

    after_backward.first = hooked.remove
    return plain, after_backward


@remedy("has a backward hook")
def _(w):
    handle = w.model[0].register_full_backward_hook(lambda *_: None)

    def step(x):
        return w.finish(w.model(x).sum())

    return step, removing(handle, step)


@remedy("All modules have a backward hook")
def _(w):
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    w.close = handle.remove

    def step(x):
        return w.finish(w.model(x).sum())

    return step, removing(handle, step)


def removing(handle, step):
    """The same step, from when ``handle`` is removed."""

    def removed(x):
        return step(x)

    removed.first = handle.remove
    return removed


@remedy("is LBFGS")
def _(w):
    w.opt = torch.optim.LBFGS(w.model.parameters())

    def step(x):
        def closure():
            w.opt.zero_grad()
            loss = F.mse_loss(w.model(x), torch.ones(6, 3))
            loss.backward()
            return loss

        return w.opt.step(closure)

    return step, None  # run it without ms.step


@remedy("gives sparse gradients")
def _(w):
    def using(**options):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, **options)
        opt = torch.optim.SGD(table.parameters(), 0.1)

        def step(x):
            loss = table(x.abs().long().clamp(0, 9)).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return step

    return using(sparse=True), using(sparse=False)


@remedy("is SparseAdam")
def _(w):
    def using(kind, **options):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, **options)
        opt = kind([*table.parameters()])

        def step(x):
            loss = table(x.abs().long().clamp(0, 9)).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return step

    return using(torch.optim.SparseAdam, sparse=True), using(torch.optim.Adam)


@remedy("takes its data from an iterator")
def _(w):
    batches = iter([torch.ones(6, 4)] * 10)

    def pulling(x):
        return w.finish(w.model(next(batches)).sum())

    def given(x):
        return w.finish(w.model(x).sum())

    return pulling, given


@remedy("random numbers from a generator of its own")
def _(w):
    generator = torch.Generator()

    def own(x):
        return w.finish((w.model(x) + torch.rand(6, 3, generator=generator)).sum())

    def default(x):
        return w.finish((w.model(x) + torch.rand(6, 3)).sum())

    return own, default


@remedy("other memory with")
def _(w):
    buffer = torch.zeros(3)

    def swapped(x):
        buffer.set_(torch.ones(3))
        return w.finish((w.model(x) + buffer).sum())

    def copied(x):
        buffer.copy_(torch.ones(3))
        return w.finish((w.model(x) + buffer).sum())

    return swapped, copied


@remedy("share memory, and the step writes both")
def _(w):
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    right.weight.data = left.weight.data
    opt = torch.optim.SGD([*left.parameters(), *right.parameters()], 0.1)

    def tied(x):
        loss = (left(x) + right(x)).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def one():
        right.weight = left.weight
        opt.param_groups.clear()
        opt.add_param_group({"params": [left.weight, left.bias, right.bias]})

    def again(x):
        return tied(x)

    again.first = one
    return tied, again


@remedy("leaves a gradient on one of its arguments")
def _(w):
    def left(x):
        loss = w.model(x).sum()
        loss.backward()
        return loss

    def returned(x):
        return torch.autograd.grad(w.model(x).sum(), x)[0]

    w.arguments = lambda: (w.x.clone().requires_grad_(),)
    return left, returned


@remedy("was computed with gradients")
def _(w):
    layer = nn.Linear(4, 4)

    def computed(x):
        return w.finish(w.model(x).sum())

    w.arguments = lambda: (layer(w.x),)

    def inside(x):
        return w.finish(w.model(layer(x.detach())).sum())

    inside.arguments = lambda: (w.x.clone(),)
    return computed, inside


@remedy("was computed outside of it, with gradients")
def _(w):
    scale = nn.Parameter(torch.ones(3))
    doubled = scale * 2

    def outside(x):
        loss = (w.model(x) * doubled).sum()
        loss.backward(retain_graph=True)
        return loss

    def inside(x):
        return w.finish((w.model(x) * (scale * 2)).sum())

    return outside, inside


@remedy("is a conjugated or negated view. Pass")
def _(w):
    def step(x):
        return x.real.sum()

    w.arguments = lambda: (torch.ones(3, dtype=torch.complex64).conj(),)

    def resolved(x):
        return x.real.sum()

    resolved.arguments = lambda: (torch.ones(3, dtype=torch.complex64).conj().resolve_conj().resolve_neg(),)
    return step, resolved


@remedy("is a sparse or nested tensor")
def _(w):
    def step(x):
        return w.finish(w.model(x).sum())

    w.arguments = lambda: (w.x.to_sparse(),)

    def dense(x):
        return step(x)

    dense.arguments = lambda: (w.x.clone(),)
    return step, dense


@remedy("has an attribute that leads back to it")
def _(w):
    class Batch(list):
        pass

    def step(batch):
        return w.finish(w.model(batch[0]).sum())

    def cyclic():
        batch = Batch([w.x.clone()])
        batch.itself = batch
        return (batch,)

    w.arguments = cyclic

    def of_items(batch):
        return step(batch)

    of_items.arguments = lambda: (Batch([w.x.clone()]),)
    return step, of_items


@remedy("shares memory with state or with another argument, and the step writes one of them")
def _(w):
    def step(x, y):
        return x.add_(1).sum() + y.sum()

    base = torch.zeros(6)
    w.arguments = lambda: (base[:4], base[2:])

    def cloned(x, y):
        return step(x, y)

    cloned.arguments = lambda: (base[:4].clone(), base[2:])
    return step, cloned


@remedy("is passed as an argument, too")
def _(w):
    bank = torch.ones(6, 4)

    def both(x):
        return w.finish((w.model(x) + w.model(bank)).sum())

    w.arguments = lambda: (bank,)

    def clone(x):
        return both(x)

    clone.arguments = lambda: (bank.clone(),)
    return both, clone


@remedy("is a module of torch.jit")
def _(w):
    def using(model):
        def step(x):
            return model(x).sum()

        return step

    plain = nn.Linear(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return using(torch.jit.trace(plain, w.x)), using(plain)


@remedy("a tensor subclass")
def _(w):
    class Tagged(torch.Tensor):
        pass

    def using(bias):
        def step(x):
            return w.finish((w.model(x) + bias).sum())

        return step

    return using(torch.ones(3).as_subclass(Tagged)), using(torch.ones(3))


@remedy("stores in")
def _(w):
    holder, table = types.SimpleNamespace(row=None), torch.zeros(4, 3)

    def view(x):
        table.add_(1)
        holder.row = table[0]
        return w.finish(w.model(x).sum())

    def clone(x):
        table.add_(1)
        holder.row = table[0].clone()
        return w.finish(w.model(x).sum())

    return view, clone


@remedy("is an iterator, which gives its items once")
def _(w):
    def lazily(x):
        return iter([w.finish(w.model(x).sum())])

    def listed(x):
        return [w.finish(w.model(x).sum())]

    return lazily, listed


@remedy("The step is a generator or a coroutine")
def _(w):
    def generator(x):
        yield w.finish(w.model(x).sum())

    def plain(x):
        return w.finish(w.model(x).sum())

    return generator, plain


@remedy("which is to see each operator")
def _(w):
    def step(x):
        return w.finish(w.model(x).sum())

    def outside(x):
        return step(x)

    w.within = lambda: FlopCounterMode(display=False)
    outside.within = contextlib.nullcontext
    return step, outside


@remedy("changes a container or an object among its arguments")
def _(w):
    def changing(batch):
        batch["loss"] = w.finish(w.model(batch["x"]).sum())
        return batch["loss"]

    def returning(batch):
        return {**batch, "loss": w.finish(w.model(batch["x"]).sum())}

    w.arguments = lambda: ({"x": w.x.clone()},)
    return changing, returning


@remedy("The step changes opt")
def _(w):
    opt = w.opt

    def changing(x):
        loss = w.model(x).sum()
        loss.backward()
        opt.step()
        opt.param_groups[0]["nesterov"] = not opt.param_groups[0]["nesterov"]
        return loss

    def outside(x):
        loss = w.model(x).sum()
        loss.backward()
        opt.step()
        return loss

    return changing, outside


@remedy("which gives something else each time")
def _(w):
    import time

    def clock(x):
        return w.finish(w.model(x).sum() * time.time())

    def argument(x, now):
        return w.finish(w.model(x).sum() * now)

    argument.arguments = lambda: (w.x.clone(), torch.tensor(time.time()))
    return clock, argument


@remedy("writes a learning rate that is a tensor")
def _(w):
    def using(rate):
        opt = torch.optim.SGD(w.model.parameters(), rate)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

        def step(x):
            loss = w.model(x).sum()
            loss.backward()
            opt.step()
            scheduler.step()
            opt.zero_grad()
            return loss

        return step

    return using(torch.tensor(0.1)), using(0.1)


@remedy("leaves")
def _(w):
    layer = w.model[0]

    def frozen(x):
        loss = w.finish(w.model(x).sum())
        layer.bias.requires_grad_(not layer.bias.requires_grad)
        return loss

    def outside(x):
        return w.finish(w.model(x).sum())

    return frozen, outside


@remedy("puts a new tensor that requires a gradient in")
def _(w):
    def replaced(x):
        w.model[2].bias = nn.Parameter(torch.ones(3))
        return w.finish(w.model(x).sum())

    def in_place(x):
        with torch.no_grad():
            w.model[2].bias.fill_(1)
        return w.finish(w.model(x).sum())

    return replaced, in_place


@remedy("which a graph would not do again. Move this out")
def _(w):
    losses = []

    def appended(x):
        loss = w.finish(w.model(x).sum())
        losses.append(loss.item())
        losses.reverse()
        return loss

    def by_callback(x):
        loss = w.finish(w.model(x).sum())
        ms.callback(losses.append, loss)
        return loss

    return appended, by_callback


@remedy("which a graph would not do again. Do that outside")
def _(w):
    import random

    def python(x):
        random.shuffle(names := ["a", "b"])
        return w.finish(w.model(x).sum() * (2 if names[0] == "a" else 1))

    def pytorch(x):
        return w.finish(w.model(x).sum() * torch.rand(()))

    return python, pytorch


@remedy("needs the very value of what")
def _(w):
    import random

    def drawn(x):
        return w.finish(w.model(x)[random.randint(0, 9) // 4 :].sum())

    def pytorch(x):
        return w.finish((w.model(x) * torch.rand(())).sum())

    return drawn, pytorch


@remedy("does with an array of random numbers what a graph cannot")
def _(w):
    def constructed(x):
        return w.finish(w.model(x * torch.FloatTensor(np.random.rand(1))).sum())

    def tensor(x):
        return w.finish(w.model(x * torch.tensor(np.random.rand(1), dtype=torch.float32)).sum())

    return constructed, tensor


@remedy("writes to a NumPy array whose memory a tensor has")
def _(w):
    def shared(x):
        tensor = torch.from_numpy(np.ones(1, np.float32))
        return w.finish(w.model(x * tensor.mul_(2)).sum())

    def copied(x):
        tensor = torch.tensor(np.ones(1, np.float32))
        return w.finish(w.model(x * tensor.mul_(2)).sum())

    return shared, copied


@remedy("needs what a NumPy array holds")
def _(w):
    def by_numpy(x):
        out = w.model(x)
        shown = out.detach().numpy()
        print(shown[shown > 0].mean())  # noqa: T201
        return w.finish(out.sum())

    def by_tensors(x):
        out = w.model(x)
        print((out * (out > 0)).sum() / (out > 0).sum())  # noqa: T201
        return w.finish(out.sum())

    return by_numpy, by_tensors


@remedy("decides by random numbers between more than")
def _(w):
    import random

    def decides(x):
        return w.finish(sum(w.model(x).sum() * (random.random() < 0.5) for _ in range(5)))

    def passed(x, kept=(True, False, True, True, False)):
        return w.finish(sum(w.model(x).sum() * each for each in kept))

    return decides, passed


@remedy("has the layout")
def _(w):
    def using(mask):
        def step(x):
            return w.finish((w.model(x) + mask.to_dense()).sum())

        return step

    return using(torch.ones(6, 3).to_sparse()), using(torch.ones(6, 3))


@remedy("The step calls logging's")
def _(w):
    import logging

    logger = logging.Logger("step")

    def within(x):
        logger.setLevel(10)
        return w.finish(w.model(x).sum())

    def before(x):
        return w.finish(w.model(x).sum())

    before.first = lambda: logger.setLevel(10)
    return within, before


@remedy("nobody can compare what that lock holds")
def _(w):
    import threading

    lock = threading.Lock()

    def by_hand(x):
        lock.acquire()
        lock.release()
        return w.finish(w.model(x).sum())

    def by_a_block(x):
        with lock:
            return w.finish(w.model(x).sum())

    return by_hand, by_a_block


@remedy("registers a hook on a parameter or other state. Change the gradient")
def _(w):
    weight = w.model[0].weight

    def hooked(x):
        weight.register_hook(lambda gradient: gradient * 2)
        return w.model(x).sum()

    def after(x):
        loss = w.model(x).sum()
        loss.backward()
        weight.grad.mul_(2)
        return loss

    return hooked, after


@remedy("assigns to .data a tensor of another shape")
def _(w):
    scale = torch.ones(1)

    def within(x):
        scale.data = torch.ones(6, 1)
        return (w.model(x) * scale).sum()

    def before(x):
        return (w.model(x) * scale).sum()

    before.first = lambda: setattr(scale, "data", torch.ones(6, 1))
    return within, before


@remedy("Compute with shapes and values only")
def _(w):
    def address(x):
        return w.finish(w.model(x).sum() * (x.data_ptr() % 64 + 1))

    def shape(x):
        return w.finish(w.model(x).sum() * (x.numel() % 64 + 1))

    return address, shape


@remedy("has a cache, with a number that changes")
def _(w):
    @functools.lru_cache
    def factor(number):
        return 1 / (1 + number)

    def through_the_cache(x, number):
        return w.finish(w.model(x).sum() * factor(number))

    def without(x, number):
        return w.finish(w.model(x).sum() * factor.__wrapped__(number))

    numbers = itertools.count()
    w.arguments = lambda: (w.x.clone(), next(numbers))
    return through_the_cache, without


ELSEWHERE = (
    "numbers from tensors",  # test_step_refusals.py
    "devices= are of one process",  # test_placed.py
    "The batch cannot be divided",  # test_micro_batches.py, as the three below
    "no common first size to divide",
    "cannot be divided into … pieces",
    "is not divided",
    "a profiler",  # test_profilers.py
    "could not be recorded",  # test_recorder.py
    "Another thread uses the generator of",  # test_draws.py
    "Another thread writes to",  # test_shared_objects.py, as the four below
    "and so did another thread",
    "made by a step that another thread has captured",
    "PyTorch was given a number",
    "known only after the call of a step",
    "Dynamo",  # of ms.compile, in Dynamo's words
    "could not be compiled",  # of the compiler's own faults: what is named is an issue of PyTorch's
    "Lightning's Trainer",  # recipes/
    "ahead of its first call",  # of ms.precompile, as the two below: calling the step compiles it
    "has to run once before it can be captured",
    "make its state ahead of the first call",
    "computes nothing with tensors",
    "belongs to",  # test_data_parallel.py
    "is in a DistributedDataParallel",  # tests/parallel
    "is under fully_shard with",  # tests/parallel
    "a parameter or gradient under fully_shard",  # tests/parallel
    "find_unused_parameters",  # tests/parallel
    "calls the collective",  # tests/parallel
    "with async_op=True",  # tests/parallel
    "launches a Triton kernel",  # test_step_operators.py
    "is compiled already",  # tests/api
    "higher-order operator",
    "gradients of a while_loop",  # tests/api/test_control.py, as the two below
    "that control flow is given",
    "gives … tensors on",  # tests/api/test_control.py
    "is given …",
    "a function that no mode sees",  # test_unlifted.py
    "C++ code that may use",  # test_twins.py, as the one below
    "follows autograd's graph",
    "on the host, from the device",  # needs a device
    "graphs in a row",  # test_step_guards.py
    "again and again",  # test_step_counts.py
    "assigns to .data what shares memory",  # test_step_rebinding.py
    "shares memory with state or with another gradient",  # test_step_rebinding.py
    "reads the gradient of one of its arguments",  # test_step_rebinding.py
    "Keep x.resolve_conj()",  # test_step_refusals.py
    "has another shape, dtype or layout",  # test_step_gradients.py
    "is out of date",  # test_step_check.py
    "cuts, pads, compares or looks",  # test_effects.py
    "formats a number by another one",  # test_effects.py
    "very value",  # test_step_values.py
    "draws from",  # test_step_refusals.py
    "ends without",  # test_step_optimizers.py
    "with a key that is another",  # test_effects.py
    "ever more that was made outside",  # test_step_refusals.py
    "ever other values",  # test_effects.py
    "within a transform",  # capture/model/test_transforms.py
    "on meta and has no values",  # test_step_models.py
    "The step writes to",  # test_step_writers.py
    "The step starts",  # test_step_impure.py
    "eager_region",  # test_eager_regions.py
    "stops in a debugger",  # test_step_debugging.py
    "MILLSTREAM_DISABLE is set",  # likewise
    "where it takes none",  # test_step_numbers.py
    "The step fails",  # test_step_errors.py: there is none
    "Please report it",  # faults of ours
    "The step changes ….",  # of hyperparameters that no graph reads: test_step_optimizers.py
)
"""Reasons whose remedies other tests follow, or that have none to follow here."""


def call(step, world, function):
    function.__dict__.pop("first", lambda: None)()
    arguments = getattr(function, "arguments", world.arguments)
    within = getattr(function, "within", getattr(world, "within", contextlib.nullcontext))
    with within():
        return step(*arguments())


def _is_said(reason, text):
    """Between a reason and its remedy stands the line."""
    return all(part in text for part in reason.split(". "))


def call_twice(step, world, function):
    for _ in range(2):
        call(step, world, function)


@pytest.mark.parametrize("reason", REMEDIES)
def test_a_remedy_works(reason):
    for number in (0, 1):
        world = World()
        function = REMEDIES[reason](world)[number]
        if function is None:
            continue
        step = Step(function, build=interpret, strict=number == 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                call(step, world, function)
        world.close()
        said = [str(each.message) for each in caught if issubclass(each.category, FallbackWarning)]
        if number == 0:
            assert any(_is_said(reason, text) for text in said), said
            assert not step.graphs
        else:
            assert step.graphs
            assert not said


@pytest.mark.parametrize("reason", REMEDIES)
def test_strict_steps_raise_with_the_reason(reason):
    world = World()
    function = REMEDIES[reason](world)[0]
    step = Step(function, build=interpret, strict=True)
    with pytest.raises(CaptureError) as caught:
        call_twice(step, world, function)
    world.close()
    assert _is_said(reason, str(caught.value))
    assert caught.value.remedy


def test_the_page_of_reasons_is_that_of_the_code():
    """Otherwise: ``python docs/reasons.py``."""
    reasons = __import__("reasons")
    assert reasons.PAGE.read_text() == reasons.make_page()


def test_each_reason_has_its_remedy_followed_somewhere():
    """A new one needs an entry above, or a test that ``ELSEWHERE`` names."""
    reasons = __import__("reasons")
    known = [*REMEDIES, *ELSEWHERE]
    rows = [row for row in reasons.make_page().splitlines() if row.startswith("| ") and "it says" not in row]
    missing = [row for row in rows if not any(_matches(part, row) for part in known)]
    assert not missing


def _matches(part, row):
    return part.replace(". ", ". | ") in row or part in row
