"""Debuggers in a step: the true reason, plain Python that shows values, and a way to have that from the start."""

import bdb
import io
import pdb
import sys
import warnings

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret


def stop_by_builtin():
    breakpoint()


def stop_by_pdb():
    pdb.Pdb(stdin=io.StringIO("p 1\nc\n"), stdout=io.StringIO(), nosigint=True).set_trace()


@pytest.fixture
def stops(monkeypatch):
    """What a debugger's prompt was given to see."""
    seen = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(2).f_locals["y"].tolist()))
    return seen


@pytest.mark.parametrize("stop", [stop_by_builtin, stop_by_pdb])
def test_a_breakpoint_is_the_reason_and_plain_python_stops_there(stop, stops):
    def function(x):
        y = x * 2
        stop()
        return y + 1

    with pytest.raises(CaptureError, match="stops in a debugger") as caught:
        Step(function, build=interpret, strict=True)(torch.ones(2))
    assert caught.value.where == f"{__file__}:{stop.__code__.co_firstlineno + 1}"
    assert "MILLSTREAM_DISABLE=1" in caught.value.remedy
    assert stops == []
    step = Step(function, build=interpret)
    with pytest.warns(FallbackWarning, match="stops in a debugger"):
        assert step(torch.ones(2)).tolist() == [3, 3]
    assert sys.gettrace() is None
    assert len(stops) == (stop is stop_by_builtin)


class Debugger(bdb.Bdb):
    """One that does something at each line of a function."""

    def __init__(self, code, act):
        super().__init__()
        self.code, self.act, self.errors = code, act, []

    def user_line(self, frame):
        if frame.f_code is self.code:
            try:
                self.act(self, frame)
            except CaptureError as error:  # as a prompt shows it
                self.errors.append(error)
        if not self.quitting:
            self.set_continue() if frame.f_code is self.code and "y" in frame.f_locals else self.set_step()

    def run(self, function, *args):
        before = sys.gettrace()
        self.reset()
        sys.settrace(self.trace_dispatch)
        try:
            return function(*args)
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("look", ["repr(y)", "y.item()", "f'{x}'", "bool(y > 0)"])
def test_a_debugger_that_looks_is_the_reason(look):
    def function(x):
        y = x * 2
        return y + 1

    step = Step(function, build=interpret)
    debugger = Debugger(function.__code__, lambda _, frame: "y" in frame.f_locals and eval(look, {}, frame.f_locals))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = debugger.run(step, torch.ones(1))
    assert result.tolist() == [3]
    if look != "y.item()":  # a number that is known later, and that the program does not use
        assert "stops in a debugger" in str(caught[0].message)
        assert f"{__file__}:{function.__code__.co_firstlineno + 2}" in str(caught[0].message)


def test_quitting_a_debugger_ends_the_call_and_changes_nothing():
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def function(x):
        y = model(x).sum()
        y.backward()
        opt.step()
        return y

    step = Step(function, build=interpret)
    step(torch.ones(1))
    before = model.weight.item(), model.weight.grad.item()
    with pytest.raises(bdb.BdbQuit):
        Debugger(function.__code__, lambda debugger, _: debugger.set_quit()).run(step, torch.ones(1))
    assert (model.weight.item(), model.weight.grad.item()) == before
    assert not step.fallbacks


def test_a_variable_of_the_environment_switches_capture_off(stops, monkeypatch):
    def function(x):
        y = x * 2
        stop_by_builtin()
        return y + 1

    def with_region(x):
        y = x * 2
        with ms.eager_region():
            z = y.tolist()
        return y + len(z)

    monkeypatch.setenv("MILLSTREAM_DISABLE", "1")
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(2).f_locals["y"].tolist()))
    step, regions, model = ms.step(function, strict=True), ms.step(with_region, strict=True), ms.compile(nn.ReLU())
    for _ in range(2):
        assert step(torch.ones(2)).tolist() == [3, 3]
        assert regions(torch.ones(2)).tolist() == [4, 4]
        assert model(-torch.ones(2)).tolist() == [0, 0]
    assert stops == [[2, 2]] * 2
    for each in (step, regions, model):
        assert "MILLSTREAM_DISABLE is set" in str(ms.explain(each))
    monkeypatch.setenv("MILLSTREAM_DISABLE", "0")
    captured = Step(lambda x: x * 2, build=interpret)
    captured(torch.ones(2))
    assert captured.graphs


def test_a_region_in_text_without_a_file_says_so():
    text = """
def function(x):
    y = x * 2
    with ms.eager_region():
        z = y.tolist()
    return y + len(z)
"""
    made = {"ms": ms}
    exec(text, made)
    step = ms.step(made["function"])
    with pytest.warns(FallbackWarning, match=r"source, .*, cannot be read\. At <string>:4\. Put the step into a file"):
        assert step(torch.ones(2)).tolist() == [4, 4]
