"""What goes wrong by the user's own mistake is raised as eager PyTorch raises it; messages show numbers as they are."""

import re
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import millstream as ms
from millstream.capture import Step
from millstream.capture.lines import is_of_call, place_of
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret


def make(strict=False, function=None):
    """A step, and the plain function."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Step(function or step, build=interpret, strict=strict), step


def test_a_function_of_the_users_may_have_the_name_of_ours():
    def run_step():
        raise TypeError

    with pytest.raises(TypeError) as caught:
        run_step()
    assert place_of(caught.value) == f"{__file__}:{run_step.__code__.co_firstlineno + 1}"
    assert not is_of_call(caught.value)


X, Y = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)
MISTAKES = {
    "a wrong dtype": ((X.double(), Y), {}),
    "a wrong dtype of targets": ((X, Y.int()), {}),
    "a wrong shape": ((torch.ones(5, 7), Y), {}),
    "a target out of range": ((X, Y + 7), {}),
    "a missing argument": ((X,), {}),
    "an extra argument": ((X, Y, Y), {}),
    "an unknown name": ((X, Y), {"z": Y}),
}


def caught(function, args, kwargs):
    with pytest.raises(Exception) as found:  # noqa: PT011  whatever eager raises
        function(*args, **kwargs)
    return found.value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_what_eager_raises_and_no_warning(mistake, capfd):
    step, plain = make()
    expected = caught(make()[1], *MISTAKES[mistake])
    capfd.readouterr()
    for is_good in (True, True, False, False, True):
        if is_good:
            step(X, Y)
            continue
        error = caught(step, *MISTAKES[mistake])
        assert (type(error), str(error)) == (type(expected), str(expected))
        assert error.__context__ is None
        names = [each.frame.code.name for each in pytest.ExceptionInfo.from_exception(error).traceback]
        assert plain.__name__ in names or any(word in mistake for word in ("argument", "name", "range"))
    assert capfd.readouterr() == ("", "")
    assert len(step.graphs) == 1
    assert not step.fallbacks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_targets_that_only_compiled_kernels_would_take_are_refused(dtype):
    plain = make()[1]
    step = ms.step(make()[1])
    step(X, Y)
    for _ in range(2):
        assert str(caught(step, (X, Y.to(dtype)), {})) == str(caught(plain, (X, Y.to(dtype)), {}))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_strict_step_says_what_and_blames_nobody(mistake, capfd):
    step, _ = make(strict=True)
    step(X, Y)
    capfd.readouterr()
    error = caught(step, *MISTAKES[mistake])
    if "argument" in mistake or "name" in mistake:
        assert type(error) is TypeError
    else:
        assert isinstance(error, CaptureError)
        assert error.where.startswith(f"{__file__}:")
        assert re.search(r"[^.]\. At .* (If the line also fails|So it does) without ms\.step", str(error))
    assert capfd.readouterr() == ("", "")


def test_a_missing_argument_of_a_step_with_regions_is_told_in_pythons_words():
    def step(x, y):
        loss = (x * y).sum()
        with ms.eager_region():
            pass
        return loss

    captured = ms.step(step)
    for _ in range(2):
        assert str(caught(captured, (X,), {})) == str(caught(step, (X,), {}))
        captured(X, X)


def test_what_only_a_trace_cannot_do_falls_back_with_the_right_result():
    kept = types.SimpleNamespace(count=0)

    def step(x):
        kept.count += 1
        return x * int(f"{kept.count}")

    captured, _ = make(function=step)
    with pytest.warns(FallbackWarning, match=r"base 10: '1'\. At .* use the number there, and not its text"):
        assert captured(X).unique().item() == 1
    assert captured(X).unique().item() == 2
    following, _ = make(strict=True, function=lambda x: x * len(range(kept.count)))
    assert following(X).unique().item() == 2


def test_an_exception_of_the_users_shows_the_number():
    kept = types.SimpleNamespace(count=0)

    def step(x):
        kept.count += 1
        if kept.count > 3:
            raise ValueError(f"count {kept.count} of {x.sum().item()}")
        return x * kept.count

    captured, _ = make(strict=True, function=step)
    for _ in range(3):
        captured(X)
    with pytest.raises(CaptureError, match="ValueError: count 4 of …") as found:
        captured(X)
    assert str(found.value.__cause__) == "count 4 of …"
    assert kept.count == 3


def test_names_in_a_refusal_show_no_stand_in():
    kept = types.SimpleNamespace()

    def step(x):
        setattr(kept, f"at {x.sum().item()}", 1)
        return x * 2

    with pytest.raises(CaptureError, match=r"changes kept\.at …, which"):
        make(strict=True, function=step)[0](X)


def test_a_fallback_returns_what_a_graph_would():
    weight = nn.Parameter(torch.ones(4))

    def step(x):
        loss = (x * weight).sum()
        loss = [loss, loss * 2][loss.item() > 0]
        return loss, {"rows": [x * weight, weight]}, weight[:2]

    captured, _ = make(function=step)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for _ in range(2):
            loss, kept, view = captured(X)
    assert captured.fallbacks
    assert loss.item() == 40
    assert not any(each.requires_grad for each in (loss, kept["rows"][0], view))
    assert kept["rows"][1] is weight
    assert view._base is None


def test_errors_name_public_types_as_eager_does():
    def no_method(x):
        return x.tensor_has_none()

    def elsewhere(x):
        return x + torch.ones(4, device="meta")

    def stops(x):
        raise StopIteration

    for function, said in (
        (no_method, "'Tensor' object has no"),
        (elsewhere, ": RuntimeError: "),
        (stops, "StopIteration."),
    ):
        with pytest.raises(CaptureError, match=said):
            make(strict=True, function=function)[0](X)
    assert make(strict=True, function=lambda x: x * len(type(x * 2).__name__))[0](X)[0, 0].item() == 6


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("dead")])
def test_a_device_that_is_full_or_dead_is_not_the_steps_mistake(error, monkeypatch):
    def fail(*_):
        raise error

    step = Step(lambda x: x.sin() + 1, build=fail)
    monkeypatch.setattr(fx.Interpreter, "run_node", fail)
    with pytest.warns(FallbackWarning, match="could not be built or run"):
        step(torch.ones(2))
    assert len(step.fallbacks) == 1
