"""What users of torch.compile bring along: its arguments, our options among its own, models that frameworks unwrap."""

import threading
import warnings

import filelock
import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import dynamo_backend, executables
from millstream.api.torch_arguments import MODES, split_options, translate
from millstream.capture.lines import is_users
from millstream.settings import Settings
from tests.clocks import HANG_S

PLAIN = {"mode": None, "fullgraph": False, "backend": None}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_options_without_graphs_of_inductors(mode):
    options = translate(Settings(), **PLAIN | {"mode": mode}).options or {}
    assert "triton.cudagraphs" not in options
    assert options.get("max_autotune", False) == mode.startswith("max-autotune")


def test_options_win_over_the_mode():
    own = Settings(options={"max_autotune": False, "epilogue_fusion": True})
    asked = translate(own, **PLAIN | {"mode": "max-autotune"})
    assert asked.options == {"max_autotune": False, "coordinate_descent_tuning": True, "epilogue_fusion": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode='fast' is unknown; choose one of 'default', 'reduce-overhead'"),
        ({"backend": "eager"}, "call torch.compile"),
        ({"fullgraph": 1}, "fullgraph=1 is neither True nor False"),
        ({"dynamic": "yes"}, "dynamic='yes' is neither"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments, message):
    with pytest.raises(ms.ArgumentError, match=message):
        ms.compile(nn.Linear(2, 2), **arguments)


def test_fullgraph_raises_where_the_graph_is_cut():
    def cut(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(ms.CaptureError):
        ms.compile(cut, fullgraph=True)(torch.ones(3))


def test_what_torch_compile_is_given_compiles():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = ms.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False, backend="inductor")
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert executables(compiled)


def test_options_of_the_backend_are_ours_and_inductors(monkeypatch):
    seen = []
    from millstream.api import compiling

    build = compiling.build
    monkeypatch.setattr(
        compiling,
        "build",
        lambda lowered, settings, **known: seen.append(settings) or build(lowered, settings, **known),
    )
    options = {"streams": 2, "engine": "serial", "memory": 2.0, "epilogue_fusion": True}
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=dynamo_backend, options=options)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert seen[0].engine == "serial"
    assert (seen[0].scheduling.streams, seen[0].scheduling.memory) == (2, 2.0)


@pytest.mark.parametrize("options", [{"streams": "many"}, {"engine": "steam"}, {"no_such_option": 1}, {"freeze": True}])
def test_wrong_options_of_the_backend_are_refused(options):
    compiled = torch.compile(nn.Linear(4, 4), backend=dynamo_backend, options=options)
    with pytest.raises(Exception, match=next(iter(options)) + "|steam"):
        compiled(torch.randn(3, 4))


def test_split_leaves_inductors_options_alone():
    assert split_options({"streams": 2, "max_autotune": True}) == ({"streams": 2}, {"max_autotune": True})
    assert split_options(None) == ({}, {})


def test_recurrent_models_that_dynamo_does_not_trace_name_step(monkeypatch):
    monkeypatch.setattr("millstream.capture.model._is_recurrent", lambda function: False)  # as in torch 2.11
    compiled = ms.compile(nn.LSTM(4, 4))
    with pytest.warns(ms.FallbackWarning, match=r"ms\.step"):
        compiled(torch.randn(2, 3, 4))


class LightningModule(nn.Module):
    """Called as Lightning's, by whose name it is known."""


class Trained(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, x):
        return self(x).sum()


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)

    def generate(self, x):
        return self(self(x))


def test_lightning_module_is_not_trained_uncompiled():
    compiled = ms.compile(Trained())
    with pytest.raises(ms.CaptureError, match=r"self.net = ms.compile\(net\)"):
        compiled.training_step(torch.ones(1, 2))
    assert compiled(torch.ones(1, 2)).shape == (1, 2)


def test_methods_that_go_around_what_is_compiled_are_told_of_once():
    model = Writer()
    compiled = ms.compile(model)
    x = torch.ones(1, 2)
    with pytest.warns(ms.FallbackWarning, match=r"generate\(\) is not compiled"):
        assert torch.equal(compiled.generate(x), model.generate(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.generate(x)
    with pytest.raises(ms.CaptureError, match="generate"):
        ms.compile(model, strict=True).generate(x)


step = tokens = 0


def test_globals_named_like_attributes_are_not_read():
    """``for step, batch in enumerate(…)`` at the top of a script, and ``optimizer.step()`` in the captured function."""
    global step, tokens  # noqa: PLW0603  as the loop of a script has them
    model = nn.ModuleDict({"tokens": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @ms.step(strict=True)
    def train_step(x):
        loss = model.tokens(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for step in range(4):
        tokens = torch.full((1, 2), float(step))
        train_step(tokens)
    assert len(executables(train_step)) == 1


def test_flag_that_says_so_while_compiling_is_computed_with_as_a_bool():
    model = nn.Linear(2, 2)

    class Asking(nn.Module):
        def forward(self, x):
            is_tracing = torch.compiler.is_compiling()
            is_tracing |= False  # as transformers does
            return model(x) * (1 if False ^ is_tracing & True else int(is_tracing) + 2)

    asking = Asking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @ms.step(strict=True)
    def train_step(x):
        loss = asking(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):
        train_step(torch.ones(1, 2))
    assert len(executables(train_step)) == 1


def test_locks_of_inductors_cache_are_none_of_the_users_code():
    assert not is_users(filelock.__file__)


@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_calls_that_overlap_leave_dynamos_configuration_as_it_was():
    """The one that begins first ends first: in torch 2.11 what the other one put back was the first one's."""
    names = "assume_static_by_default", "automatic_dynamic_shapes", "recompile_limit"
    before = [getattr(torch._dynamo.config, name) for name in names]
    calls = []
    for _ in range(2):
        began, may_end = threading.Event(), threading.Event()
        may_end.set()

        @torch.compiler.disable
        def pause(x, began=began, may_end=may_end):
            began.set()
            assert may_end.wait(HANG_S)
            return x

        compiled = ms.compile(lambda x, pause=pause: pause(x + 1) * 2, dynamic=True)
        compiled(torch.ones(3))
        calls.append((threading.Thread(target=compiled, args=(torch.ones(3),)), began, may_end))
    for thread, began, may_end in calls:
        began.clear()
        may_end.clear()
        thread.start()
        assert began.wait(HANG_S)
    for thread, _, may_end in calls:
        may_end.set()
        thread.join()
    assert [getattr(torch._dynamo.config, name) for name in names] == before
