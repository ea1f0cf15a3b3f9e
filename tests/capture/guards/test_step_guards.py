"""A graph is replayed only while everything it took for granted holds; results are never stale."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from millstream.capture import Step
from millstream.capture.guards import native
from millstream.capture.guards.guards import Guards
from millstream.errors import FallbackWarning
from tests.capture.worlds import World, batches, check, interpret, plain
from tests.processes import output_of


@pytest.fixture(autouse=True)
def _both_ways(monkeypatch):
    """Compiled checks, which steps on a device use, and those in Python notice the same in each call."""
    monkeypatch.setattr(native, "DEVICES", frozenset({"cpu"}))
    hold = Guards.hold

    def hold_both(guards):
        found, quick = hold(guards), guards.quick
        guards.quick = None
        try:
            assert (hold(guards) is None) is (found is None)
        finally:
            guards.quick = quick
        return found

    monkeypatch.setattr(Guards, "hold", hold_both)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        # No bias before the normalisation: its true gradient is zero, so that Adam would step along rounding errors.
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(8, 3)
        self.temperature = 1.0

    def forward(self, x):
        return self.head(self.body(x)) / self.temperature


def world(model=None, kind=torch.optim.AdamW, lr=0.01, **options):
    model = model or Net()
    opt = kind(model.parameters(), lr=lr, **options)
    return World(plain(model, opt), [model], [opt])


def run(between, count=8, make=world, **options):
    options = {"rtol": 1e-3, "atol": 1e-4, "graphs": None} | options
    return check(make, batches(count, 6, 4), between=between, **options)


def at(number, change):
    def between(world, now):
        if now == number:
            change(world)

    return between


def test_nothing_changes():
    assert run(None, graphs=1).graphs[0].num_runs == 7


def test_eval_and_train():
    def switch(world, number):
        world.modules[0].train(number % 4 != 3)

    assert len(run(switch, 12).graphs) == 2


def test_mode_set_inside_of_the_step():
    def make():
        inner = world()
        model = inner.modules[0]

        def step(x, y):
            model.train()
            return inner.step(x, y)

        inner.step_before, inner_step = inner.step, step
        return World(inner_step, inner.modules, inner.optimizers)

    def switch(world, number):
        if number in (3, 5):
            world.modules[0].eval()

    run(switch, make=make)


def test_dropout_probability():
    run(at(4, lambda world: setattr(world.modules[0].body[3], "p", 0.5)), graphs=2)


def test_attribute_of_the_users_module():
    run(at(4, lambda world: setattr(world.modules[0], "temperature", 2.0)), graphs=2)


def test_momentum_of_batch_norm():
    run(at(4, lambda world: setattr(world.modules[0].body[1], "momentum", 0.5)), graphs=2)


def test_load_state_dict_keeps_the_graph():
    def load(world):
        state = world.modules[0].state_dict()
        world.modules[0].load_state_dict(
            {key: value * 0.5 if value.is_floating_point() else value for key, value in state.items()}
        )

    run(at(4, load), graphs=1)


def test_load_state_dict_assign():
    def load(world):
        state = copy.deepcopy(world.modules[0].state_dict())
        world.modules[0].load_state_dict(
            {key: value * 0.5 if value.is_floating_point() else value for key, value in state.items()}, assign=True
        )
        # The optimizer keeps the old parameters, in eager mode too.

    run(at(4, load))


def test_optimizer_load_state_dict():
    def load(world):
        state = copy.deepcopy(world.optimizers[0].state_dict())
        for entry in state["state"].values():
            entry["exp_avg"] *= 0.5
        world.optimizers[0].load_state_dict(state)

    step = run(at(4, load), graphs=1)  # the old graph is gone
    assert step.graphs[0].num_runs == 4


def test_checkpoint_and_resume_exactly():
    data = batches(8, 6, 4)

    def train(stop):
        torch.manual_seed(0)
        first = world()
        step = Step(first.step, build=interpret, strict=True)
        for batch in data[:stop]:
            step(*batch)
        saved = copy.deepcopy((first.modules[0].state_dict(), first.optimizers[0].state_dict()))
        second = world()
        second.modules[0].load_state_dict(saved[0])
        second.optimizers[0].load_state_dict(saved[1])
        again = Step(second.step, build=interpret, strict=True)
        for batch in data[stop:]:
            again(*batch)
        return second.state()

    left, right = train(4), train(6)
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]


def test_parameter_replaced():
    def replace(world):
        head = world.modules[0].head
        head.weight = nn.Parameter(head.weight.detach() * 0.5)

    run(at(4, replace))


def test_parameter_data_replaced():
    def replace(world):
        for parameter in world.modules[0].parameters():
            parameter.data = parameter.data * 0.5

    run(at(4, replace))


def test_gradient_data_replaced():
    def make():
        inner = world()
        model, opt = inner.modules[0], inner.optimizers[0]

        def step(x, y):  # gradients of two calls add up
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return World(step, inner.modules, inner.optimizers)

    def replace(world):
        for parameter in world.modules[0].parameters():
            parameter.grad.data = parameter.grad.data * 0.5

    run(at(4, replace), make=make)


def test_dtype_converted_and_back():
    def convert(world, number):
        if number == 4:
            world.modules[0].double()
            world.modules[0].float()

    run(convert)


def test_buffer_replaced():
    run(at(4, lambda world: setattr(world.modules[0].body[1], "running_mean", torch.ones(8))))


def test_submodule_replaced():
    def replace(world):
        torch.manual_seed(3)
        world.modules[0].body[2] = nn.Tanh()

    run(at(4, replace))


def test_submodule_appended():
    run(at(4, lambda world: world.modules[0].body.append(nn.Tanh())))


def test_frozen_and_unfrozen():
    def freeze(world, number):
        world.modules[0].head.requires_grad_(number not in (3, 4))

    run(freeze, graphs=2)


def test_parameter_group_added():
    def make():
        inner = world(kind=torch.optim.SGD, lr=0.1)
        inner.extra = nn.Parameter(torch.ones(3))
        step = inner.step

        def with_extra(x, y):
            (inner.extra * y.float().mean()).sum().backward()
            return step(x, y)

        made = World(with_extra, inner.modules, inner.optimizers, [inner.extra])
        made.extra = inner.extra
        return made

    run(at(4, lambda world: world.optimizers[0].add_param_group({"params": [world.extra]})), make=make)


def test_forward_hook_added_and_removed():
    def hook(world, number):
        if number == 3:
            world.handle = world.modules[0].register_forward_hook(lambda module, args, result: result * 2)
        if number == 6:
            world.handle.remove()

    run(hook, 9)


def test_hook_on_a_parameter_registered_later():
    torch.manual_seed(0)
    made = world()
    step = Step(made.step, build=interpret)
    data = batches(5, 6, 4)
    for batch in data[:3]:
        step(*batch)
    seen = []
    made.modules[0].head.weight.register_hook(lambda grad: seen.append(grad))
    with pytest.warns(FallbackWarning, match=r"model.head.weight has a hook on its gradient"):
        step(*data[3])
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*data[4])
    assert len(seen) == 2


def test_new_shapes_dtypes_and_strides_get_graphs_of_their_own():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()

    def step(x):
        return model(x.double()).sum()

    captured = Step(step, build=interpret, strict=True)
    x = torch.randn(6, 4)
    for argument in (x, x[:3], x.half(), torch.randn(4, 6).t(), x):
        assert captured(argument).item() == pytest.approx(model(argument.double()).sum().item())
    assert len(captured.graphs) == 4
    assert captured.graphs[-1].num_runs == 2


def test_values_of_other_arguments_select_graphs():
    captured = Step(lambda x, scale, mode="a": x * scale if mode == "a" else x - scale, build=interpret, strict=True)
    x = torch.ones(2)
    assert captured(x, 2).tolist() == [2, 2]
    assert captured(x, 2.0).tolist() == [2, 2]
    assert captured(x, True).tolist() == [1, 1]
    assert captured(x, 2, mode="b").tolist() == [-1, -1]
    assert captured(x, 2).tolist() == [2, 2]
    assert len(captured.graphs) == 4


def test_number_of_graphs_is_bounded_and_the_oldest_goes():
    released = []

    def build(gm, inputs, static):
        class Executable:
            def __call__(self, values):
                return list(gm(*values))

            def release(self):
                released.append(inputs[-1].shape[0])

        return Executable()

    captured = Step(lambda x: x * 2, build=build, strict=True, max_graphs=2, dynamic=False)
    for size in (1, 2, 1, 3, 1, 2):
        assert captured(torch.ones(size)).tolist() == [2] * size
    assert len(captured.graphs) == 2
    assert released == [2, 3]


def test_steps_that_never_repeat_end_in_eager_mode():
    captured = Step(lambda x: x * 2, build=interpret, max_graphs=2, dynamic=False)
    with pytest.warns(FallbackWarning, match="hardly served again"):
        for size in range(1, 12):
            assert captured(torch.ones(size)).tolist() == [2] * size
    assert len(captured.graphs) == 2


def test_global_and_closure_values():
    scale = 1.0

    def step(x):
        return x * scale * FACTOR["value"]

    captured = Step(step, build=interpret, strict=True)
    x = torch.ones(2)
    assert captured(x).tolist() == [3, 3]
    scale = 2.0
    assert captured(x).tolist() == [6, 6]
    FACTOR["value"] = 1.0
    try:
        assert captured(x).tolist() == [2, 2]
    finally:
        FACTOR["value"] = 3.0
    assert captured(x).tolist() == [6, 6]
    assert len(captured.graphs) == 3


FACTOR = {"value": 3.0}


def test_autocast_and_grad_mode_select_graphs():
    model = nn.Linear(4, 3)
    captured = Step(lambda x: model(x), build=interpret, strict=True)
    x = torch.randn(2, 4)
    assert captured(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert captured(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert captured(x).dtype == torch.float32
    assert len(captured.graphs) == 3


def test_a_default_dtype_selects_a_graph_under_autocast_too():
    captured = Step(lambda x: (x @ x, torch.full((2,), 1 / 3)), build=interpret, strict=True)
    x = torch.randn(2, 2)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                assert captured(x)[1].dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(captured.graphs) == 2


@pytest.mark.parametrize("first", [True, False])
def test_anomaly_mode_sees_what_it_is_to_see(first):
    """A graph has no checks: the step runs as it is, and is captured again when the mode is left."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(1.5).mean()
        loss.backward()
        optimizer.step()
        return loss

    captured, x = Step(step, build=interpret), torch.ones(2, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    if not first:
        captured(x)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(FallbackWarning, match="anomaly mode"):
        captured(x)
    with torch.autograd.set_detect_anomaly(True, check_nan=True), pytest.raises(RuntimeError, match="nan values"):
        captured(-x * 9)
    for _ in range(2):
        captured(x)
    assert captured.graphs


def test_two_steps_over_one_model():
    torch.manual_seed(0)
    shared = world()
    first = Step(shared.step, build=interpret, strict=True)
    second = Step(lambda x, y: shared.step(x, y) * 2, build=interpret, strict=True)
    torch.manual_seed(0)
    other = world()
    for number, batch in enumerate(batches(8, 6, 4)):
        ours = (first if number % 2 else second)(*batch)
        theirs = other.step(*batch) * (1 if number % 2 else 2)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
    assert len(first.graphs) == len(second.graphs) == 1


def test_scaler_settings():
    def make():
        model = nn.Linear(4, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

        def step(x, y):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return scaler._scale.clone()

        made = World(step, [model], [opt])
        made.scaler = scaler
        return made

    run(at(4, lambda world: world.scaler.set_growth_factor(3.0)), make=make, graphs=2)


def test_absent_bias_is_given_one():
    def make():
        model = Net()
        model.head.bias = None
        return world(model)

    def give(world):
        world.modules[0].head.bias = nn.Parameter(torch.ones(3))

    run(at(4, give), make=make)


@pytest.mark.parametrize("how", ["all", "one", "emptied", "replaced"])
def test_optimizer_state_that_is_reset(how):
    def reset(world, number):
        state = world.optimizers[0].state
        weight = world.modules[0].head.weight
        if number != 4:
            return
        if how == "all":
            state.clear()
        elif how == "one":
            del state[weight]
        else:
            state[weight] = {} if how == "emptied" else {"momentum_buffer": torch.ones_like(weight)}

    run(reset, make=lambda: world(kind=torch.optim.SGD, momentum=0.9))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_locks_of_its_own():
    """At that moment another thread of the parent may hold them, which waits for the one that forks."""
    told = output_of(
        """
        import importlib, os, threading, warnings
        from millstream.capture import Step
        from millstream.locks import TRACING
        fetch = importlib.import_module("millstream.results.fetching")
        warnings.simplefilter("ignore")  # about threads in who forks

        step, held, done = Step(print, build=None), threading.Event(), threading.Event()
        def hold():
            with TRACING.lock, step._lock.lock, fetch._fetchers_lock.lock:
                held.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            locks = TRACING.lock, step._lock.lock, fetch._fetchers_lock.lock
            os._exit(sum(not lock.acquire(timeout=1) for lock in locks))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        done.set()
        """
    )
    assert told.split() == ["0"]
