"""What cannot be captured is refused with reason, line and remedy, and leaves everything exactly as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import random
import threading
import warnings
from collections import Counter, deque
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.flop_counter import FlopCounterMode

from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import World, assert_same, batches, interpret
from tests.clocks import HANG_S


class Base:
    """A model with everything that could be disturbed: statistics, dropout, gradients, optimizer state."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = lr_scheduler.StepLR(self.opt, 2)
        self.history, self.kept = [], {}
        self.count = 0

    def finish(self, loss):
        loss.backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)
        return loss

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)


def item_as_index(base, x, y):
    base.finish(base.loss(x, y))
    return [1, 2, 3][y[0].item()]


def pads_text(base, x, y):
    loss = base.finish(base.loss(x, y))
    print(f"{loss.item():.3f}".ljust(40) + "|")  # noqa: T201
    return loss


def cuts_text(base, x, y):
    return f"{base.finish(base.loss(x, y)).item()}"[:5]


def rate_read_again(base, x, y):
    base.scheduler.step()
    return base.finish(base.loss(x, y))


def key_of_text(base, x, y):
    loss = base.finish(base.loss(x, y))
    base.kept[f"{loss.item():.3f}"] = 1
    return loss


def result_by_text(base, x, y):
    loss = base.finish(base.loss(x, y))
    return {f"{loss.item():.3f}": loss}


def key_of_count(base, x, y):
    base.count += 1
    base.kept[base.count] = 1
    return base.finish(base.loss(x, y))


@functools.lru_cache
def weight_of(count):
    return 1 / count


def cached_by_count(base, x, y):
    base.count += 1
    return base.finish(base.loss(x, y)) * weight_of(base.count)


def long_list(base, x, y):
    base.finish(base.loss(x, y))
    return x.repeat(20, 1).tolist()


def swallowed(base, x, y):
    loss = base.finish(base.loss(x, y))
    try:
        value = [1.0, 2.0][y[0].item()]
    except Exception:  # noqa: BLE001
        value = -1.0
    return loss * value


def to_numpy(base, x, y):
    base.finish(base.loss(x, y))
    return np.asarray(x).sum()


def mask(base, x, y):
    return base.finish(base.loss(x, y) + x[x > 0].sum())


def nonzero(base, x, y):
    return base.finish(base.loss(x, y) + y.nonzero().sum())


def appends(base, x, y):
    loss = base.finish(base.loss(x, y))
    base.history.append(loss)
    return loss


def clips_finite(base, x, y):
    loss = base.finish(base.loss(x, y))
    nn.utils.clip_grad_norm_(base.model.parameters(), 1.0, error_if_nonfinite=True)
    return loss


def drawn_array(base, x, y):
    order = np.arange(3)
    np.random.shuffle(order)
    return base.finish(base.loss(x, y) * order[0])


def seeds(base, x, y):
    torch.manual_seed(3)
    return base.finish(base.loss(x, y))


def own_generator(base, x, y):
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return base.finish(base.loss(x + noise, y))


def freezes(base, x, y):
    loss = base.finish(base.loss(x, y))
    base.model[0].weight.requires_grad_(not base.model[0].weight.requires_grad)
    return loss


def marks_a_parameter(base, x, y):
    loss = base.finish(base.loss(x, y))
    base.model[0].weight.last_loss = loss.item()
    return loss


def hooks(base, x, y):
    handle = base.model[0].weight.register_hook(lambda grad: grad * 2)
    loss = base.finish(base.loss(x, y))
    handle.remove()
    return loss


def fails(base, x, y):
    loss = base.finish(base.loss(x, y))
    if base.history is not None:
        raise KeyError("the user's own mistake")
    return loss


def numpy_input(base, x, y):
    return base.finish(base.loss(x + torch.tensor(np.array(1, dtype=np.float32)), y))


REFUSED = {
    item_as_index: ("indexes with a tensor's value", "item_as_index", "f-strings"),
    pads_text: ("cuts, pads, compares or looks", "pads_text", "Format the value itself"),
    cuts_text: ("cuts, pads, compares or looks", "", "Format the value itself"),
    rate_read_again: ("a number that StepLR.step() changes in the same call", "", "after it"),
    key_of_text: ("changes base.kept", "key_of_text", "ms.callback"),
    result_by_text: ("a key that is another in each call", "", "ms.callback"),
    key_of_count: ("changes base.kept", "key_of_count", "ms.callback"),
    cached_by_count: ("weight_of, which has a cache", "", "__wrapped__"),
    long_list: ("more than 256 numbers", "long_list", "outside of the step"),
    swallowed: ("indexes with a tensor's value", "swallowed", "f-strings"),
    to_numpy: ("NumPy array", "to_numpy", "outside of the step"),
    mask: ("shape of a result depends on values", "mask", "torch.where"),
    nonzero: ("shape of a result depends on values", "nonzero", "torch.where"),
    appends: ("changes", "appends", "out of the step"),
    clips_finite: ("branches on a tensor's value", "", "torch.where"),
    drawn_array: ("calls numpy.random.shuffle", "drawn_array", "outside of the step"),
    seeds: ("sets a seed", "seeds", "outside of the step"),
    own_generator: ("generator of its own", "own_generator", "torch.manual_seed"),
    freezes: ("requires_grad changed", "", "out of the step"),
    marks_a_parameter: ("puts an attribute on", "", "in a dict"),
    hooks: ("registers a hook", "hooks", "after backward"),
    numpy_input: ("reads a NumPy array", "numpy_input", "pass that"),
}


def prepared(function):
    """A base after one eager step, with gradients left from elsewhere, and the step to be tried."""
    torch.manual_seed(0)
    base = Base()
    data = batches(3, 6, 4)
    base.finish(base.loss(*data[0]))
    base.loss(*data[1]).backward()

    def step(x, y):
        return function(base, x, y)

    return base, step, data[2]


def world_of(base):
    return World(None, [base.model], [base.opt])


def fingerprint(base):
    """Everything that must be untouched: objects, values, versions apart."""
    tensors = [*base.model.parameters(), *base.model.buffers()]
    tensors += [value for entry in base.opt.state.values() for value in entry.values()]
    tensors += [parameter.grad for parameter in base.model.parameters()]
    return {
        "ids": [id(tensor) for tensor in tensors],
        "types": [type(tensor) for tensor in tensors],
        "attributes": [dict(vars(tensor)) for tensor in tensors],
        "addresses": [tensor.data_ptr() for tensor in tensors],
        "flags": [dict(group, params=None) for group in base.opt.param_groups],
        "requires_grad": [tensor.requires_grad for tensor in tensors],
        "modes": [module.training for module in base.model.modules()],
        "python": (list(base.history), dict(base.kept), base.count, vars(base).get("last"), random.getstate()),
        "scheduler": {key: value for key, value in vars(base.scheduler).items() if not callable(value)},
        "optimizer": set(vars(base.opt)),
        "module": [set(vars(module)) for module in base.model.modules()],
    }, [tensor.detach().clone() for tensor in tensors] + [torch.get_rng_state()]


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_strict_raises_and_touches_nothing(function):
    base, step, batch = prepared(function)
    facts, values = fingerprint(base)
    with pytest.raises(CaptureError) as caught:
        Step(step, build=interpret, strict=True)(*batch)
    reason, place, remedy = REFUSED[function]
    if reason:
        assert reason in caught.value.reason
    if place:
        filename, _, line = caught.value.where.rpartition(":")
        assert filename == __file__
        first = function.__code__.co_firstlineno
        assert first <= int(line) <= first + 8
    assert remedy in caught.value.remedy
    now, now_values = fingerprint(base)
    assert now == facts
    for left, right in zip(values, now_values, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_falls_back_once_with_a_warning_and_the_same_numbers(function, capsys):
    base, step, batch = prepared(function)
    captured = Step(step, build=interpret)
    torch.manual_seed(5)
    np.random.seed(5)
    with pytest.warns(FallbackWarning) as caught:
        ours = [captured(*batch)]
    assert len(caught) == 1
    assert "runs as plain Python" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.append(captured(*batch))
    other, plain, _ = prepared(function)
    torch.manual_seed(5)
    np.random.seed(5)
    theirs = [plain(*batch), plain(*batch)]
    assert_same(ours, theirs, rtol=0, atol=0)
    assert_same(world_of(base).state(), world_of(other).state(), rtol=0, atol=0)
    assert (len(base.history), base.count) == (len(other.history), other.count)
    assert captured.graphs == []
    assert len(captured.fallbacks) == 1


def test_the_users_own_error_is_raised_as_it_is():
    _, step, batch = prepared(fails)
    captured = Step(step, build=interpret)
    for _ in range(2):
        with pytest.raises(KeyError, match="own mistake"):
            captured(*batch)
    assert not captured.fallbacks


def test_lbfgs():
    model = nn.Linear(4, 3)
    opt = torch.optim.LBFGS(model.parameters())

    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure)

    with pytest.raises(CaptureError, match="LBFGS"):
        Step(step, build=interpret, strict=True)(*batches(1, 6, 4)[0])


def test_batch_norm_with_a_cumulative_average():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(CaptureError, match="plain number of a tensor"):
        Step(lambda x: model(x), build=interpret, strict=True)(torch.randn(6, 4))


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "module", "all modules", "optimizer in backward"])
def test_hooks_that_run_in_backward(kind, request):
    model = nn.Sequential(nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "tensor":
        model[0].weight.register_hook(lambda grad: grad * 2)
    elif kind == "accumulated":
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    elif kind == "module":
        model[0].register_full_backward_hook(lambda *_: None)
    elif kind == "all modules":
        request.addfinalizer(nn.modules.module.register_module_full_backward_hook(lambda *_: None).remove)
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: opt.step())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    with pytest.raises(CaptureError, match="hook") as caught:
        Step(step, build=interpret, strict=True)(*batches(1, 6, 4)[0])
    assert (__file__ in caught.value.where) == (kind in ("module", "all modules"))  # of PyTorch's there are no names


def test_arguments_that_share_memory_of_which_one_is_written():
    captured = Step(lambda x, y: x.add_(1).sum() + y.sum(), build=interpret, strict=True)
    base = torch.zeros(4)
    with pytest.raises(CaptureError, match="shares memory"):
        captured(base[:2], base[1:])
    assert base.tolist() == [0, 0, 0, 0]
    left, right = torch.zeros(3), torch.zeros(3)
    assert captured(left, right).item() == 3
    with pytest.raises(CaptureError, match="shares memory"):
        captured(base[:3], base[1:])


def test_arguments_that_share_memory_and_are_only_read():
    captured = Step(lambda x, y: (x + y).sum(), build=interpret, strict=True)
    base = torch.arange(4.0)
    assert captured(base[:3], base[1:]).item() == 9


def test_an_argument_that_shares_memory_with_state():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    captured = Step(step, build=interpret, strict=True)
    captured(torch.ones(2, 2))
    captured(torch.ones(2, 2))
    with pytest.raises(CaptureError, match="shares memory"):
        captured(model.weight.detach())


@pytest.mark.parametrize("is_flag", [False, True])
def test_an_argument_that_is_written_shares_memory_with_state_that_is_read(is_flag):
    base = torch.zeros(3)
    state = base[0]

    def step(x):
        x.add_(1)
        return (x * 2 if state > 0 else x + 1) if is_flag else x * state

    captured = Step(step, build=interpret, strict=True)
    with pytest.raises(CaptureError, match="shares memory"):
        captured(base[:2])
    assert base.tolist() == [0, 0, 0]
    x = torch.zeros(2)
    assert captured(x).tolist() == ([2, 2] if is_flag else [0, 0])
    with pytest.raises(CaptureError, match="shares memory"):
        captured(base[:2])
    assert base.tolist() == [0, 0, 0]


def test_an_argument_on_another_device():
    model = nn.Linear(2, 2)
    captured = Step(lambda x: model(x), build=interpret, strict=True)
    with pytest.raises(CaptureError, match="device"):
        captured(torch.ones(2, 2, device="meta"))


def test_an_argument_that_gets_a_gradient():
    model = nn.Linear(2, 2)

    def step(x):
        model(x).sum().backward()

    with pytest.raises(CaptureError, match="gradient on one of its arguments"):
        Step(step, build=interpret, strict=True)(torch.ones(2, 2, requires_grad=True))


def test_an_argument_of_an_outer_graph_runs_eagerly():
    x = torch.ones(2, requires_grad=True)
    captured = Step(lambda x: (x * 3).sum(), build=interpret)
    with pytest.warns(FallbackWarning, match="computed with gradients"):
        result = captured(x * 2)
    result.backward()
    assert x.grad.tolist() == [6, 6]


@pytest.mark.parametrize("when", ["build", "first run"])
def test_a_failing_build_or_first_run_leaves_everything_as_it_was(when):
    def build(gm, inputs, static):
        if when == "build":
            inputs[0].zero_()
            raise RuntimeError("no compiler")

        def run(values):
            gm(*values)
            torch.rand(3)
            raise RuntimeError("out of memory")

        return run

    base, step, batch = prepared(lambda base, x, y: base.finish(base.loss(x, y)))
    facts, values = fingerprint(base)
    with pytest.raises(CaptureError, match=r"no compiler|out of memory"):
        Step(step, build=build, strict=True)(*batch)
    now, now_values = fingerprint(base)
    assert now == facts
    for left, right in zip(values, now_values, strict=True):
        assert torch.equal(left, right)


def test_a_reason_that_quotes_a_sentence_ends_with_one_full_stop():
    error = CaptureError("Tracing failed: it has no shape yet..", where="net.py:3", remedy="Call it once.")
    assert str(error) == "Tracing failed: it has no shape yet. At net.py:3. Call it once."
    assert str(CaptureError("It waits ...", remedy="Go on.")) == "It waits ... Go on."


def test_the_warning_names_reason_line_and_remedy():
    _, step, batch = prepared(to_numpy)
    with pytest.warns(FallbackWarning) as caught:
        Step(step, build=interpret)(*batch)
    message = str(caught[0].message)
    line = to_numpy.__code__.co_firstlineno + 2
    assert message == (
        f"step runs as plain Python: The step turns a tensor into a NumPy array. At {__file__}:{line}. "
        "Read it with .item(), whose value can be formatted, logged, stored and returned, or outside of the step; for a"
        " branch use torch.where."
    )


def test_a_tensor_computed_outside_with_gradients():
    model = nn.Linear(2, 2)
    outside = model(torch.ones(1, 2))
    with pytest.raises(CaptureError, match="computed outside of it, with gradients") as caught:
        Step(lambda x: x * outside, build=interpret, strict=True)(torch.ones(2))
    assert caught.value.where.startswith(__file__)


def test_a_scaler_that_is_updated_elsewhere():
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x, y):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        opt.zero_grad()

    x, y = batches(1, 6, 4)[0]
    step(x, y)
    scaler.update()
    with pytest.raises(CaptureError, match=r"without scaler.update\(\)"):
        Step(step, build=interpret, strict=True)(x, y)
    step(x, y)
    scaler.update()


def test_other_threads_are_not_disturbed_while_tracing():
    """A loader that collates NumPy arrays, a scheduler and a module at work elsewhere."""
    started, results = threading.Event(), []

    def elsewhere():
        started.wait(HANG_S)
        try:
            net, opt = nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1.0)
            plan = lr_scheduler.StepLR(opt, 1, gamma=0.5)
            opt.step()
            plan.step()
            results.append(
                (torch.from_numpy(np.ones(2, dtype=np.float32)), net(torch.ones(1, 2)), opt.param_groups[0]["lr"])
            )
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()

    def step(x):
        started.set()
        thread.join(HANG_S)  # it does all of its work while the step is traced
        return x * 2

    assert Step(step, build=interpret, strict=True)(torch.ones(2)).tolist() == [2, 2]
    thread.join(HANG_S)
    (result,) = results
    assert isinstance(result, tuple), result
    assert result[2] == 0.5


def test_sparse_arguments():
    with pytest.raises(CaptureError, match="sparse"):
        Step(lambda x: x * 2, build=interpret, strict=True)(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: deque([x]),
        lambda x: {x},
        lambda x: {"loss": x}.values(),
        lambda x: partial(print, x),
        lambda x: lambda: x,
        lambda x: nn.Parameter(x),
    ],
)
def test_results_that_nobody_could_put_together_again(wrap):
    with pytest.raises(CaptureError, match=r"with tensors inside|new Parameter"):
        Step(lambda x: wrap(x * 2), build=interpret, strict=True)(torch.ones(2))


def test_a_counter_is_put_together_of_what_it_counts():
    step = Step(lambda x: Counter(loss=x * 2), build=interpret, strict=True)
    for _ in range(3):
        (item,) = step(torch.ones(2)).items()
        assert item[0] == "loss"
        assert torch.equal(item[1], torch.full((2,), 2.0))


def test_results_are_detached_also_of_a_call_that_runs_eagerly():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, h):
        loss = (model(x) + h).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return {"loss": loss, "h": (loss * 2, 3)}

    captured, h = Step(step, build=interpret, strict=True), torch.zeros(())
    for _ in range(3):
        result = captured(torch.ones(2), h)
        h = result["h"][0]
        assert not h.requires_grad
        assert not result["loss"].requires_grad


def store(batch):
    batch["h"] = batch["x"] * 2


def count(batch):
    batch["n"] += 1


def append(batch):
    batch["logs"].append(batch["x"].sum())


def reorder(batch):
    batch["pair"].reverse()


def set_field(batch):
    batch["point"].x = batch["x"] * 2


@dataclasses.dataclass
class Point:
    x: torch.Tensor


@pytest.mark.parametrize("change", [store, count, append, reorder, set_field], ids=lambda change: change.__name__)
def test_containers_among_the_arguments_that_the_step_changes(change):
    def step(batch):
        change(batch)
        return batch["x"].sum()

    def make(number):
        x, pair = torch.full((2,), float(number)), [torch.zeros(2), torch.ones(2)]
        return {"x": x, "n": 0, "logs": [], "pair": pair, "point": Point(torch.zeros(2))}

    ours = Step(step, build=interpret)
    for number in range(3):
        batch, expected = make(number), make(number)
        with pytest.warns(FallbackWarning, match="container") if number == 0 else contextlib.nullcontext():
            ours(batch)
        step(expected)
        assert_same(batch, expected)


def fill(kind):
    tensors = [torch.full((2,), float(number)) for number in range(4)]
    if kind != "queue":
        return iter(tensors) if kind == "list" else (tensor for tensor in tensors)
    items = queue.Queue()
    for tensor in tensors:
        items.put(tensor)
    return items


@pytest.mark.parametrize("kind", ["list", "generator", "queue"])
def test_data_from_an_iterator(kind):
    source = fill(kind)
    take = source.get if kind == "queue" else lambda: next(source)
    ours = Step(lambda: take() * 2, build=interpret)
    with pytest.warns(FallbackWarning, match="from an iterator.* as an argument"):
        results = [ours()]
    results += [ours() for _ in range(3)]
    assert [result[0].item() for result in results] == [0, 2, 4, 6]


def first_of(source):
    for each in source:
        return each
    return None


def first_given(first, *_):
    return first


def assigned(source):
    first, *_ = source
    return first


TAKING = {
    "next": next,
    "a loop": first_of,
    "an assignment": assigned,
    "a call": lambda source: max(*source),
    "a call of Python's": lambda source: first_given(*source),
    "a list": lambda source: len([*source]),
    "a comprehension": lambda source: len([each for each, _ in zip(source, range(1), strict=False)]),
    "a class": lambda source: len(list(source)),
    "a method": lambda source: len([].__iadd__(source)),
    "a test": lambda source: 2.0 in source,
    "another": lambda source: next(map(float, source)),
    "a function": sum,
}


@pytest.mark.parametrize("way", TAKING)
def test_an_iterator_is_asked_by_no_step_that_is_captured(way):
    source = iter([1.0, 2.0, 3.0])
    with pytest.raises(CaptureError, match="from an iterator"):
        Step(lambda x: x * TAKING[way](source), build=interpret, strict=True)(torch.ones(2))
    assert [*source] == [1.0, 2.0, 3.0]


def test_an_iterator_that_a_module_has_and_its_code_never_names():
    model = nn.Linear(2, 2)
    model.ids = iter([torch.zeros(1)])
    ours = Step(lambda x: model(x).sum(), build=interpret, strict=True)
    assert ours(torch.ones(1, 2)).item() == model(torch.ones(1, 2)).sum().item()
    assert next(model.ids).item() == 0


def test_many_signatures_give_one_warning():
    calls = []

    def step(x):
        calls.append(None)
        calls.clear()
        return np.asarray(x).sum()

    captured = Step(step, build=interpret, max_graphs=2)
    with pytest.warns(FallbackWarning) as caught:
        for size in range(1, 12):
            assert captured(torch.ones(size)) == size
    assert len(caught) == 1
    assert len(captured.fallbacks) == 2  # then it stops trying


def test_strict_raises_every_time():
    captured = Step(lambda x: np.asarray(x), build=interpret, strict=True, max_graphs=1)
    for size in (1, 1, 2, 3, 4, 5):
        with pytest.raises(CaptureError):
            captured(torch.ones(size))


def test_the_users_exception_has_no_history_of_ours():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        model(x).sum().backward()
        opt.step()
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        Step(step, build=interpret)(torch.ones(1, 2))
    assert caught.value.__context__ is None


def test_a_generator_that_is_met_and_not_drawn_from():
    mine = random.Random(0)
    assert Step(lambda x: x * mine.VERSION, build=interpret, strict=True)(torch.ones(1)).item() == 3


@pytest.mark.parametrize(
    "change", [lambda: torch.random.fork_rng(), lambda: torch.set_rng_state(torch.get_rng_state())]
)
def test_states_of_random_numbers_are_not_set(change):
    def step(x):
        with change() or contextlib.nullcontext():
            return F.dropout(x)

    with pytest.raises(CaptureError, match="sets a state of random numbers"):
        Step(step, build=interpret, strict=True)(torch.ones(2))


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind, make):
    model = kind(7, 3, sparse=True)
    opt = make(model.parameters())

    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        opt.step()
        return loss

    with pytest.raises(CaptureError, match="sparse"):
        Step(step, build=interpret, strict=True)(torch.tensor([[1, 2]]))


def step_of_two(first, second, parameters):
    opt = torch.optim.SGD(parameters, 0.1)

    def step(x):
        loss = second(first(x).tanh()).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def test_parameters_in_one_memory_that_are_both_written():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    step = step_of_two(first, second, [*first.parameters(), *second.parameters()])
    ours = Step(step, build=interpret, strict=True)
    ours(torch.ones(1, 4))
    with pytest.raises(CaptureError, match=r"first\.weight and second\.weight share memory"):
        ours(torch.ones(1, 4))


def test_parameters_that_are_parts_of_one_memory():
    flat = torch.randn(40)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    at = 0
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    ours = Step(step_of_two(first, second, [*first.parameters(), *second.parameters()]), build=interpret, strict=True)
    losses = [ours(torch.ones(1, 4)).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (Passing, "Passing"),
        (partial(FlopCounterMode, display=False), "_FlopCounterMode"),
        (partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x, lambda x: x), "saved_tensors_hooks"),
    ],
)
def test_modes_that_see_each_operator(mode, name):
    model = nn.Linear(4, 4)
    ours = Step(lambda x: model(x).sum(), build=interpret)
    ours(torch.ones(1, 4))
    (graph,) = ours.graphs
    runs = graph.num_runs
    with pytest.warns(FallbackWarning, match=f"called within {name}"), mode() as entered:
        ours(torch.ones(1, 4))
    assert graph.num_runs == runs
    if name == "_FlopCounterMode":
        assert entered.get_total_flops() == 32
    ours(torch.ones(1, 4))
    assert graph.num_runs == runs + 1


def test_default_devices_have_graphs_of_their_own():
    ours = Step(lambda x: x + torch.ones(2), build=interpret, strict=True)
    ours(torch.zeros(2))
    with torch.device("cpu"):
        ours(torch.zeros(2))
        ours(torch.zeros(2))
    assert [graph.num_runs for graph in ours.graphs] == [1, 2]


def test_what_must_not_be_used_may_be_found():
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    layers[0].register_full_backward_hook(lambda *_: None)
    layers[1].weight.register_hook(lambda gradient: gradient)
    odd = [
        *(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), torch.optim.SparseAdam(nn.Linear(2, 2).parameters())),
        *(nn.Embedding(3, 2, sparse=True), *layers),
    ]

    def use(x):
        return sum(each(x).sum() for each in odd if isinstance(each, nn.Linear))

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, is_odd):
        loss = use(x) if is_odd else model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ours = Step(step, build=interpret, strict=True)
    for _ in range(2):
        ours(torch.ones(1, 4), is_odd=False)
    assert len(ours.graphs) == 1
    with pytest.raises(CaptureError, match="LBFGS"):
        ours(torch.ones(1, 4), is_odd=True)
