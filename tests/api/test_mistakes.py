"""Wrong uses, as newcomers make them: the error says what was given, what was expected, and what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.cpp_builder import cpp_compiler_search

import millstream as ms


@pytest.fixture(scope="module")
def forward_only():
    model, target = nn.Linear(3, 2), torch.tensor([0, 1, 1, 0])

    @ms.step
    def loss_of(x):
        return F.cross_entropy(model(x), target)

    return model, loss_of


@pytest.mark.parametrize("calls", [1, 2])
def test_backward_outside_of_a_step_is_told_of(forward_only, calls):
    model, loss_of = forward_only
    for _ in range(calls):
        loss = loss_of(torch.ones(4, 3))
    for use in (loss.backward, lambda: torch.autograd.grad(loss, [*model.parameters()])):
        with pytest.raises(RuntimeError, match="does not require grad") as error:
            use()
        assert "loss_of" in error.value.__notes__[0]
        assert "Call backward() within the step" in error.value.__notes__[0]


def test_backward_as_such_and_its_other_errors_are_pytorchs(forward_only):
    model, _ = forward_only
    loss = F.cross_entropy(model(torch.ones(4, 3)), torch.tensor([0, 1, 1, 0]))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as error:
        loss.backward()
    assert not hasattr(error.value, "__notes__")


@pytest.fixture
def _no_compiler():
    cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield
    cpp_compiler_search.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_a_machine_without_a_compiler_is_named_with_its_remedy(wrap):
    torch._dynamo.reset()
    compiled = wrap(lambda x: torch.tanh(x) * 3 + 17)
    with pytest.warns(ms.FallbackWarning, match=r"no-such-compiler.*Install g\+\+ or clang.*millstream doctor"):
        result = compiled(torch.ones(5))
    torch.testing.assert_close(result, torch.tanh(torch.ones(5)) * 3 + 17)


def test_a_folder_that_is_not_there_is_named(tmp_path, forward_only):
    _, loss_of = forward_only
    loss_of(torch.ones(4, 3))
    with ms.profile() as profile:
        loss_of(torch.ones(4, 3))
    for report in (ms.explain(loss_of), profile):
        with pytest.raises(ms.ArgumentError, match=r"cannot write .*x\.html: there is no folder .*absent"):
            report.save(tmp_path / "absent" / "x.html")


def test_an_engine_that_the_environment_names_is_said_to_be_its(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_ENGINE", "fast")
    with pytest.raises(ms.ArgumentError, match=r"MILLSTREAM_ENGINE='fast' is no engine; .*'serial'.*unset"):
        ms.step(lambda x: x.tan() + 2)(torch.ones(3))
