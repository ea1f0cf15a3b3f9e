"""A compiled model or function is used like the original: within others, as a method, with items, on odd views."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

import millstream as ms
from millstream.api import executables
from millstream.capture import model as compile_module
from tests import networks

# Dynamo does not look into a compiled model within another, and says so.
CUT = "ignore:.*the graph is cut:millstream.FallbackWarning"


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("outer", [ms.compile, torch.compile], ids=["ours", "torch"])
@pytest.mark.filterwarnings(CUT)
def test_a_compiled_model_within_another(outer):
    torch._dynamo.reset()
    inner, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad():
        torch.testing.assert_close(outer(Outer(ms.compile(inner)))(x), inner(x) * 2)


def test_a_compiled_model_within_another_is_named_where_strictly_one_graph_is_asked_for():
    outer = nn.Sequential(Outer(ms.compile(nn.Linear(2, 2))))
    with pytest.raises(ms.CaptureError, match=r"Sequential\.0\.inner is compiled already"):
        ms.compile(outer, strict=True)


def test_methods_that_return_the_model_return_the_compiled_one():
    compiled = ms.compile(nn.Linear(2, 2))
    for result in (compiled.train(), compiled.eval(), compiled.to("cpu"), compiled.apply(lambda module: None)):
        assert result is compiled


class Scaled:
    scale = 3.0

    @ms.compile
    def compiled(self, x):
        return x * self.scale

    @ms.step
    def stepped(self, x):
        return x * self.scale


@pytest.mark.parametrize("name", ["compiled", "stepped"])
def test_a_method(name):
    scaled = Scaled()
    assert getattr(scaled, name)(torch.ones(2)).tolist() == [3, 3]
    assert "1 kernel" in str(ms.explain(getattr(scaled, name)))
    assert "1 kernel" in str(ms.explain(getattr(Scaled, name)))


def test_items_of_a_model_that_has_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = ms.compile(model)
    assert len(compiled) == 2
    assert compiled[0] is model[0]
    assert list(compiled) == list(model)
    assert model[1] in compiled
    compiled[1] = nn.Tanh()
    assert isinstance(model[1], nn.Tanh)
    assert "nothing is compiled; call it once" in str(ms.explain(compiled))
    assert not isinstance(ms.compile(nn.Linear(2, 2)), Iterable)


@pytest.mark.parametrize("wrap", [ms.compile, ms.step], ids=["compile", "step"])
def test_views_with_another_sign_than_their_memory(wrap):
    torch._dynamo.reset()
    wrapped = wrap(lambda x: x * 2)
    z = torch.tensor([1 + 2j, 3 + 4j])
    assert wrapped(z.imag).tolist() == [4, 8]
    with pytest.warns(ms.FallbackWarning, match="conjugated or negated view"):
        assert wrapped(z.conj().imag).tolist() == [-4, -8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrapped(z.imag).tolist() == [4, 8]


BAD = {
    "nope": {"options": {"nope": 1}},
    "options=3": {"options": 3},
    "max_graphs=2.5": {"max_graphs": 2.5},
    "max_graphs='a'": {"max_graphs": "a"},
    "streams=2.0": {"streams": 2.0},
}


@pytest.mark.parametrize("wrap", [ms.compile, ms.step], ids=["compile", "step"])
@pytest.mark.parametrize("named", BAD)
def test_a_bad_option_is_named(wrap, named):
    with pytest.raises(ms.ArgumentError, match=named.replace(".", r"\.")):
        wrap(lambda x: x, **BAD[named])


@pytest.mark.parametrize("wrap", [ms.compile, ms.step], ids=["compile", "step"])
def test_what_cannot_be_called_is_refused(wrap):
    with pytest.raises(ms.ArgumentError, match=r"takes a .*function.*, not int"):
        wrap(3)


@pytest.mark.parametrize("wrap", [ms.compile, torch.compile], ids=["ours", "torch's"])
def test_what_is_compiled_already_is_refused(wrap):
    for model in (nn.Linear(2, 2), lambda x: x * 2):
        with pytest.raises(ms.ArgumentError, match="has compiled already"):
            ms.compile(wrap(model))
    ms.compile(torch.compiler.disable(lambda x: x * 2))


def test_arguments_of_compile_are_explained_where_a_step_has_none():
    for name in ("mode", "fullgraph", "backend", "freeze"):
        with pytest.raises(TypeError, match=rf"step\(\) got an unexpected keyword argument '{name}'\. \w+ "):
            ms.step(lambda x: x, **{name: "default"})


def test_forward_by_name_is_compiled_and_runs_no_hooks():
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    compiled = ms.compile(model)
    torch.testing.assert_close(compiled.forward(x), model.forward(x))
    assert len(ms.explain(compiled).programs) == 1
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    model.register_forward_hook(lambda module, args, result: result * 0)
    torch.testing.assert_close(compiled.forward(x), model.forward(x))
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("inner", [False, True], ids=["of the model", "of one within"])
def test_hooks_registered_and_removed_later(register, inner):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    compiled, x = ms.compile(model), torch.ones(1, 2)

    def zero(_module, values, result=None):
        return (values[0] * 0,) if result is None else result * 0

    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
            handle = getattr(compiled[2] if inner else compiled, register)(zero)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
            handle.remove()
        torch.testing.assert_close(compiled(x), model(x))


def test_where_dynamo_takes_no_more_forms_strict_is_an_error_of_ours(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compile_module, "RECOMPILE_LIMIT", 2)
    compiled = ms.compile(lambda x: x.sin() * 2, strict=True, dynamic=False)
    with dynamo_config.patch(recompile_limit=2):
        for size in (2, 3):
            compiled(torch.ones(size))
        with pytest.raises(ms.CaptureError, match="captures no more"):
            compiled(torch.ones(4))


def test_threads_take_as_many_forms_and_others_keep_their_limit():
    """In PyTorch 2.13 each thread has a configuration of its own."""
    torch._dynamo.reset()
    seen, theirs = [], []

    def call():
        before = dynamo_config.recompile_limit
        compiled = ms.compile(lambda x: x.cos() * 2, dynamic=False)
        for size in range(2, 13):
            compiled(torch.ones(size))
        seen.append((len(compiled.compiler.graphs), dynamo_config.recompile_limit == before))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [(11, True)]

    def graph(gm, inputs):
        theirs.append(dynamo_config.recompile_limit)
        return gm.forward

    torch.compile(lambda x: x.sin() + 1, backend=graph)(torch.ones(3))
    assert theirs == [8]


def test_freezing_is_asked_for_by_our_calls_only():
    from torch._dynamo.variables import builder

    before = builder.is_parameter_freezing
    model = nn.Linear(4, 2).eval()
    compiled = ms.compile(model, freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert builder.is_parameter_freezing is before
    with pytest.raises(TypeError), torch.no_grad():
        compiled("no tensor")
    assert builder.is_parameter_freezing is before


@pytest.mark.parametrize("wrap", ["part of a model", "by torch.compile"])
def test_a_compiled_model_within_another_keeps_no_other_from_being_captured(wrap):
    """Models of PyTorch's own classes are one to Dynamo: where it gives one up, it takes none any more."""
    torch._dynamo.reset()
    inner = ms.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.FallbackWarning)
        outer = {
            "part of a model": lambda: ms.compile(nn.Sequential(inner, nn.ReLU())),
            "by torch.compile": lambda: torch.compile(inner),
        }[wrap]()
        outer(x)
    for model in (nn.Sequential(nn.Linear(8, 2)), nn.Linear(8, 3)):
        compiled = ms.compile(model, strict=True)
        networks.assert_close(compiled(x), model(x))
        assert executables(compiled)


def test_a_model_that_holds_a_compiled_function_can_be_copied():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(4, 4), ms.compile(lambda x: torch.tanh(x) * 2, strict=True)

        def forward(self, x):
            return self.act(self.layer(x))

    torch._dynamo.reset()
    net, x = Net(), torch.randn(2, 4)
    expected = net(x)
    other = copy.deepcopy(net)
    assert torch.equal(other(x), expected)
    assert other.act is not net.act
    assert executables(other.act)


def test_many_models_of_one_class_that_others_compile_take_no_form_of_ours():
    torch._dynamo.reset()
    x = torch.ones(1, 2)
    with torch.no_grad():
        for width in range(2, 14):
            torch.compile(nn.Sequential(nn.Linear(2, width)), backend="eager")(x)
        model = nn.Sequential(nn.Linear(2, 20))
        compiled = ms.compile(model)
        if not compile_module._ISOLATED:  # before 2.13: it is said
            with pytest.warns(ms.FallbackWarning, match="captured by others"):
                compiled(x)
            return
        torch.testing.assert_close(compiled(x), model(x))
    assert len(executables(compiled)) == 1


def test_where_others_have_used_up_the_forms_it_is_said(monkeypatch):
    monkeypatch.setattr(compile_module, "_ISOLATED", {})
    test_many_models_of_one_class_that_others_compile_take_no_form_of_ours()


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_that_is_refilled_before_the_backward_pass_is_an_error_as_in_eager(dynamic):
    layer = nn.Linear(4, 4)

    def forward(plain, batched, turned, part, flat, added):
        rows = [plain, batched.flatten(0, 1), turned.t(), part[1:3], flat.view(2, 4)]
        return sum(layer(each).square().sum() for each in rows) + added.view(2, 2).sum()

    def outcomes(call):
        sizes = (2, 4), (3, 2, 4), (4, 3), (5, 4), (8,), (4,)
        raised = []
        for refilled in range(-1, len(sizes)):
            inputs = [torch.full(size, 2.0) for size in sizes]
            loss = call(*inputs)
            if refilled >= 0:
                inputs[refilled].fill_(7)
            try:
                raised.append(torch.autograd.grad(loss, layer.weight)[0])
            except RuntimeError as error:
                raised.append("modified by an inplace operation" in str(error))
        return raised

    torch._dynamo.reset()
    torch.testing.assert_close(outcomes(ms.compile(forward, dynamic=dynamic, strict=True)), outcomes(forward))
