"""What code would read that does not run may change as it likes; what code reads that runs is noticed."""

from __future__ import annotations

import functools
import string
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret


class Trainer:
    """Its ``train`` is found by the name alone, since the step calls the model's."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.source = iter([torch.full((3, 2), float(number)) for number in range(1, 6)])
        self.epoch = 0
        self.last = None

    def step(self, x):
        self.model.train()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, step):
        losses = []
        for batch in self.source:
            self.epoch += 1
            self.last = batch
            losses.append(step(batch).item())
        return losses


def trained(capture):
    torch.manual_seed(0)
    trainer = Trainer()
    step = Step(trainer.step, build=interpret, strict=True) if capture else trainer.step
    return trainer.train(step), step


def test_a_trainer_with_an_iterator_a_counter_and_its_last_batch():
    expected, _ = trained(capture=False)
    losses, step = trained(capture=True)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert len(step.graphs) == 1


def test_an_iterator_is_refused_before_it_is_asked():
    source = iter(range(4))

    def pull():
        return next(source)

    def step(x):
        return helper(x * 2)

    def helper(x):
        return x * pull()

    ours = Step(step, build=interpret)
    with pytest.warns(FallbackWarning, match="iterator, source"):
        results = [ours(torch.ones(1)).item()]
    results += [ours(torch.ones(1)).item() for _ in range(3)]
    assert results == [0, 2, 4, 6]


def test_an_argument_that_the_step_also_uses_by_name():
    kept = torch.ones(2)
    with pytest.raises(CaptureError, match="kept is passed as an argument, too"):
        Step(lambda x: x + kept, build=interpret, strict=True)(kept)


def test_what_a_module_carries_and_nobody_reads():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stats = {"calls": 0}
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight

    model = Model()
    step = Step(lambda x: model(x).sum(), build=interpret, strict=True)
    for number in range(4):
        assert step(torch.full((2,), float(number))).item() == 2 * number
        model.stats["calls"] += 1
    assert len(step.graphs) == 1


def by_name(model):
    return model.scales["a"]


def by_vars(model):
    return vars(model)["scales"]["a"]


def by_computed_name(model):
    return getattr(model, "sca" + "les")["a"]


@pytest.mark.parametrize("read", [by_name, by_vars, by_computed_name])
def test_what_a_module_carries_and_code_reads(read):
    model = nn.Linear(2, 2)
    model.scales = {"a": 1.0}
    step = Step(lambda x: model(x).sum() * 0 + read(model), build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        model.scales["a"] = value
        assert step(torch.ones(1, 2)).item() == value


scale = 1.0


def scaled(x):
    return x * scale


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * scale


def by_gradient(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(Scaled.apply(x).sum(), x)[0]


def by_checkpoint(x):
    weight = torch.ones(1, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(lambda y: scaled(y * weight), x, use_reentrant=False).sum()
    return torch.autograd.grad(loss, weight)[0] + 0 * x


REGISTRY = types.SimpleNamespace()
setattr(REGISTRY, "scaled" + "_by_name", scaled)


WAYS = {
    "no_grad": torch.no_grad()(scaled),
    "autocast": torch.autocast("cpu", enabled=False)(scaled),
    "wraps": functools.wraps(scaled)(lambda x: scaled(x)),
    "partial": functools.partial(scaled),
    "registry": lambda x: getattr(REGISTRY, "_".join(("scaled", "by", "name")))(x),
    "module of another name": lambda x: vars(sys.modules[__name__])["sca" + "led"](x),
    "gradient": by_gradient,
    "checkpoint": by_checkpoint,
}


@pytest.mark.parametrize("way", WAYS)
def test_code_is_found_when_it_runs(way, monkeypatch):
    step = Step(WAYS[way], build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "scale", value)
        assert step(torch.ones(1)).item() == value


def beside(x):
    return x


def by_attribute_of_a_function():
    return (lambda x: x * beside.scale), lambda value: setattr(beside, "scale", value)


def by_cache():
    world = types.SimpleNamespace(scale=1.0)

    @functools.lru_cache
    def ask():
        return world.scale

    def change(value):
        world.scale = value
        ask.cache_clear()
        ask()

    return (lambda x: x * ask()), change


def past_the_module():
    model = nn.Linear(2, 2)
    model.scales = {}
    change = functools.partial(model.scales.__setitem__, "a")
    return (lambda x: x * object.__getattribute__(model, "scales")["a"]), change


def by_hook():
    model = nn.Identity()
    monitor = types.SimpleNamespace(scale=1.0)
    model.register_forward_hook(functools.partial(lambda mine, *args: args[-1] * mine.scale, monitor))
    return model, lambda value: setattr(monitor, "scale", value)


def by_one_of_two_closures():
    def make(world):
        return lambda module, args, result: result * world.scale

    worlds = [types.SimpleNamespace(scale=1.0) for _ in range(2)]
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for part, world in zip(model, worlds, strict=True):
        part.register_forward_hook(make(world))
    return model, lambda value: setattr(worlds[1], "scale", value)


def by_kept_method():
    table, row = {"a": 1.0}, [1.0]
    get, item = table.get, row.__getitem__
    return (lambda x: x * get("a") * item(0) ** 0), functools.partial(table.__setitem__, "a")


def by_views():
    table = {"a": 1.0}
    values, proxy = table.values(), types.MappingProxyType(table)
    return (lambda x: x * sum(values) * proxy["a"] / sum(values)), functools.partial(table.__setitem__, "a")


def by_dispatch():
    @functools.singledispatch
    def ask(key):
        return 1.0

    return (lambda x: x * ask(1)), lambda value: ask.register(int, lambda key: value)


def by_template():
    template = string.Template("1")
    return (lambda x: x * float(template.template)), lambda value: setattr(template, "template", str(value))


def by_arguments_of_the_process():
    return (lambda x: x * float(sys.argv[-1])), lambda value: sys.argv.__setitem__(-1, str(value))


OTHERS = [
    by_attribute_of_a_function,
    by_cache,
    past_the_module,
    by_hook,
    by_one_of_two_closures,
    by_kept_method,
    by_views,
    by_dispatch,
    by_template,
    by_arguments_of_the_process,
]


@pytest.mark.parametrize("way", OTHERS)
def test_what_is_read_in_other_ways(way, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    function, change = way()
    step = Step(lambda x: function(x), build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        change(value)
        assert step(torch.ones(1)).item() == value


IMPORTS = [
    "import settings; return x * settings.scale",
    "import settings.inner; return x * settings.inner.scale",
    "import settings.inner as mine; return x * mine.scales[0]",
    "from settings import inner; return x * inner.Held.scale",
    "from . import inner; return x * inner.scale",
    "from .inner import scale; return x * scale",
    "import sys; return x * sys.modules['settings'].scale",
    "import sys; return x * sys.modules['.'.join(['settings', 'inner'])].scale",
    "import importlib; return x * importlib.import_module('.inner', 'settings').scale",
    "return x * globals()['scale']",
    "return x * globals().get('scales')[0]",
    "return x * (scale if 'scale' in globals() else 1.0)",
]


@pytest.mark.parametrize("way", IMPORTS)
def test_what_is_read_from_modules_that_the_function_finds(way, monkeypatch):
    package, inner = types.ModuleType("settings"), types.ModuleType("settings.inner")  # the first is of no file
    package.inner, package.__path__, inner.__file__ = inner, [], __file__
    inner.scales, inner.Held = [1.0], type("Held", (), {})
    for module in (package, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    held = {"__name__": "settings.outer", "__package__": "settings", "scales": inner.scales}
    exec(f"def function(x): {way}", held)
    step = Step(lambda x: held["function"](x), build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        held["scale"] = package.scale = inner.scale = inner.scales[0] = inner.Held.scale = value
        assert step(torch.ones(1)).item() == value


COMPUTED = ["globals()['sca' + name[3:]]", "globals()[name]", "globals().get(name)", "(lambda: globals())()[name]"]


@pytest.mark.parametrize("way", COMPUTED)
def test_a_global_whose_name_is_computed_is_noticed(way):
    exec(compile(f"def function(x, name='scale'): return x * {way}", "users.py", "exec"), held := {})
    step = Step(held["function"], build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        held["scale"] = value
        assert step(torch.ones(1)).item() == value


def test_vmap_with_a_number():
    step = Step(lambda x: torch.func.vmap(lambda row: row * 2.0)(x).sum(), build=interpret)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # whether it can be captured is PyTorch's to say
        assert [step(torch.ones(2, 2)).item() for _ in range(3)] == [8, 8, 8]


def test_code_that_runs_later():
    world = types.SimpleNamespace(late=False, shift=1.0)

    def shifted(x):
        return x + world.shift

    step = Step(lambda x: shifted(x) if world.late else x * 1, build=interpret, strict=True)
    results = []
    for world.late, world.shift in [(False, 1.0), (False, 2.0), (True, 3.0), (True, 4.0), (False, 5.0)]:
        results.append(step(torch.ones(1)).item())
    assert results == [1, 1, 4, 5, 1]


class Machine:
    """Its methods are found by names that it computes."""

    def __init__(self):
        self.factor = 1.0
        self.extra = torch.ones(1)

    def run(self, x):
        for number in range(40):
            x = getattr(self, f"do_{number}")(x)
        return x


def make_method(number):
    if number == 39:
        return lambda self, x: x * self.factor + self.extra
    return lambda self, x: x + number * self.factor


for number in range(40):
    setattr(Machine, f"do_{number}", make_method(number))


def test_many_methods_that_are_found_late():
    machine = Machine()
    step = Step(machine.run, build=interpret, strict=True)
    for machine.factor in (1.0, 2.0):
        assert step(torch.ones(1)).item() == machine.run(torch.ones(1)).item()


count = 0


def counted(x):
    global count  # noqa: PLW0603
    count += 1
    return x * 1


def test_what_code_that_is_found_late_counts_is_counted_once_a_call():
    hidden = "coun" + "ted"
    step = Step(lambda x: vars(sys.modules[__name__])[hidden](x), build=interpret, strict=True)
    before = count
    for number in range(1, 4):
        step(torch.ones(1))
        assert count == before + number
    assert len(step.graphs) == 1


class Registry(dict):
    """Like those of libraries: ``get`` and ``[]`` mean something else."""

    def get(self, model):
        return super().get(type(model).__name__)

    def __setitem__(self, model, value):
        super().__setitem__(type(model).__name__, value)

    def __getitem__(self, model):
        raise AssertionError

    def __len__(self):
        raise AssertionError


def test_a_dict_with_methods_of_its_own():
    registry, model = Registry(), nn.Linear(2, 2)
    step = Step(lambda x: model(x).sum() * 0 + registry.get(model), build=interpret, strict=True)
    for value in (1.0, 2.0, 3.0):
        registry[model] = value
        assert step(torch.ones(1, 2)).item() == value


class Key:
    def __repr__(self):
        raise AssertionError


def test_keys_are_not_asked_for_their_names():
    key = Key()
    table = {key: 1.0}
    step = Step(lambda x: x * table[key], build=interpret, strict=True)
    for table[key] in (1.0, 2.0):
        assert step(torch.ones(1)).item() == table[key]


class Stubborn:
    @property
    def __class__(self):
        raise RuntimeError("do not look at me")


def test_what_does_not_let_itself_be_looked_at():
    held = [Stubborn()]
    step = Step(lambda x: x * len(held), build=interpret)
    with pytest.warns(FallbackWarning, match="do not look at me"):
        assert step(torch.ones(1)).item() == 1


@torch.library.custom_op("millstream_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / divisor


@halved.register_fake
def _(x):
    return torch.empty_like(x) if divisor == 2 else x.new_empty(())


divisor = 2


def test_operators_of_the_users_lead_to_code_that_is_watched(monkeypatch):
    step = Step(lambda x: torch.ops.millstream_tests.halved(x) + 1, build=interpret, strict=True)
    assert step(torch.ones(2)).tolist() == [1.5, 1.5]
    monkeypatch.setattr(sys.modules[__name__], "divisor", 4)  # which the graph's shapes depend on
    step(torch.ones(2))
    assert len(step.graphs) == 2
