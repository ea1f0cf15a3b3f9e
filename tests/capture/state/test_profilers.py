"""Profilers and tracers of others: a step notices beside them what it notices alone, and they go on."""

import contextlib
import copy
import cProfile
import sys
import time
import types
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity

from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.guards.programs import frozen
from tests.capture.worlds import interpret


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    with frozen():
        yield


class Balance:
    """A profile function by which each call has one end, and that knows what has been called."""

    def __init__(self):
        self.seen, self.wrong, self._open = set(), [], []

    def __call__(self, frame, event, argument):
        what = frame.f_code if event in ("call", "return") else argument
        if event.endswith("call"):
            self._open.append(what)
            self.seen.add(what)
        elif self._open and self._open.pop() != what:
            self.wrong.append((event, what))


@contextlib.contextmanager
def profiled_by(function):
    sys.setprofile(function)
    try:
        yield
        assert sys.getprofile() is function
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def traced_by(function):
    before = sys.gettrace()
    sys.settrace(function)
    try:
        yield
        assert sys.gettrace() is function
    finally:
        sys.settrace(before)


def torch_profiler():
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True)


def one(x):
    return x + 1


# --- what is read beside them ----------------------------------------------------------------------------------------

READS = {
    "getattr": lambda space, name: getattr(space, name),
    "vars": lambda space, name: vars(space)[name],
    "repr": lambda space, name: float(repr(space).partition("=")[2].strip(")")),
    "copy": lambda space, name: copy.copy(space).v,
    "loop": lambda space, name: sum(getattr(space, each) for each in dir(space) if each == name),
}

WATCHES = {
    "cProfile": cProfile.Profile,
    "profile function": lambda: profiled_by(Balance()),
    "trace function": lambda: traced_by(lambda frame, event, argument: None),
}


@pytest.mark.parametrize("watch", WATCHES)
def test_what_is_read_by_computed_names_is_noticed(watch):
    spaces = {way: types.SimpleNamespace(v=2.0) for way in READS}
    name = "".join(["v"])

    def function(x):
        for way, read in READS.items():
            x = x * read(spaces[way], name)
        return x

    step = Step(function, build=interpret, strict=True)
    with WATCHES[watch]():
        for changed in (None, *READS):
            if changed is not None:
                spaces[changed].v += 1
            assert step(torch.ones(1)).item() == function(torch.ones(1)).item(), changed


# --- they go on ------------------------------------------------------------------------------------------------------


def reads_a_clock(x):
    return x * min(1, int(time.time()))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there profilers miss some calls of PyTorch's own tracer, too")
@pytest.mark.parametrize("function", [one, reads_a_clock])
def test_cprofile_has_what_runs_before_and_after_in_the_calls_in_progress(function):
    step = Step(function, build=interpret)

    def leaf():
        pass

    def train():
        leaf()
        step(torch.ones(1))
        leaf()

    with warnings.catch_warnings(), cProfile.Profile() as profiler:
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(2):
            train()
            leaf()
    entries = {entry.code: entry for entry in profiler.getstats()}
    assert entries[leaf.__code__].callcount == 6
    assert entries[train.__code__].callcount == 2
    assert {call.code: call.callcount for call in entries[train.__code__].calls}[leaf.__code__] == 4
    assert bool(step.graphs) == (function is one)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there profilers miss some calls of PyTorch's own tracer, too")
@pytest.mark.parametrize("function", [one, reads_a_clock])
def test_a_profile_function_sees_each_call_and_its_end(function):
    step, balance = Step(function, build=interpret), Balance()
    with warnings.catch_warnings(), profiled_by(balance):
        warnings.simplefilter("ignore", FallbackWarning)
        step(torch.ones(1))
    assert balance.wrong == []
    assert function.__code__ in balance.seen
    assert bool(step.graphs) == (function is one)


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_a_profiler_in_c_goes_on_beside_a_capture():
    space = types.SimpleNamespace(v=2.0)
    step = Step(lambda x: x * getattr(space, "".join(["v"])), build=interpret, strict=True, check=1)
    with torch_profiler():
        assert sys.getprofile() is not None
        for space.v in (2.0, 3.0):
            assert step(torch.ones(1)).item() == space.v
        assert sys.getprofile() is not None
        strict = Step(one, build=interpret, strict=True)
        strict.precompile(torch.ones(1))
    assert [len(each.graphs) for each in (step, strict)] == [2, 1]


def starts_cprofile(x):
    with cProfile.Profile():
        return x + 1


def sets_a_function(x):
    sys.setprofile(None)
    return x + 1


def starts_pytorchs(x):
    with torch_profiler():
        return x + 1


@pytest.mark.parametrize("function", [starts_cprofile, sets_a_function, starts_pytorchs])
def test_a_step_that_starts_or_stops_one_is_refused(function):
    step = Step(function, build=interpret)
    with pytest.warns(
        FallbackWarning, match="starts or stops a profiler.*Start and stop it outside of the step"
    ) as told:
        assert step(torch.ones(1)).item() == 2
    if function is not starts_pytorchs:  # which does so in C
        assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in str(told[0].message)
    assert step(torch.ones(1)).item() == 2
    assert sys.getprofile() is None
    outside = Step(one, build=interpret, strict=True)
    with cProfile.Profile():
        assert outside(torch.ones(1)).item() == 2
