"""A later process takes a trace from disk where tracing would give the same, and traces where anything differs."""

import copy
import decimal
import enum
import functools
import io
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sized

import numpy as np
import pytest
import torch
from torch import nn
from torch._decomp import global_decomposition_table
from torch._inductor.lowering import lowerings

from millstream.capture import Step
from millstream.capture.kept import pickling
from millstream.capture.kept.descriptions import TraceNotKept
from millstream.capture.step.capturing import retracing
from millstream.errors import FallbackWarning
from tests.capture.guards.cells import CELLS
from tests.capture.guards.programs import Program, Site, _load, frozen
from tests.capture.kept.edits import EDITS, FILES
from tests.capture.worlds import assert_same, interpret
from tests.processes import bring_compiled_code

FEW = 40
"""Each so many cells are in every run; all of them, and all edits, in the slow ones."""


def train(make, calls=4):
    """A new instance of a program as a step, beside eager: the same results and weights after each call."""
    (ours, weights), (theirs, others) = make(), make()
    step = Step(ours, build=interpret)
    for call in range(calls):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(call), dtype=weights[0].dtype)
        assert_same(step(x.clone()), theirs(x.clone()), name="result")
        for one, other in zip(weights, others, strict=True):
            assert_same(one, other, name="weight")
            assert_same(one.grad, other.grad, name="gradient")
    return step


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trainer():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(4) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, state = [], {"calls": 0, "mean": 0.0}

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        state["calls"] += 1
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.item()
        return {"loss": loss, "text": f"{state['calls']}: {loss.item():.4f}", "rate": scheduler.get_last_lr()[0]}

    return step, [*model.parameters(), *model.buffers()]


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = [each.detach().clone() for each in model.parameters()]

    def step(x, *, scale=2.0):
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average, model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return loss, x

    return step, [*model.parameters(), *average]


def refuse(*_):
    raise AssertionError("it is traced")


@pytest.mark.parametrize("make", [trainer, tied])
def test_another_instance_of_a_program_is_not_traced(make, taken, monkeypatch):
    train(make)
    assert not taken
    copy.copy(object.__new__(torch.optim.lr_scheduler.StepLR))  # notes slots in its class: lowering copies operators
    monkeypatch.setattr(retracing, "trace_step", refuse)
    step = train(make)
    assert taken == [True]
    assert not step.refusals
    assert any("its trace was on disk" in line for line in step.history)


def test_traces_can_be_switched_off(taken, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_TRACES", "0")
    train(tied)
    assert not [*(tmp_path / "traces").iterdir()]


def test_a_graph_from_disk_is_guarded_as_a_traced_one(taken):
    first, second = train(tied).graphs[0], train(tied).graphs[0]
    assert taken == [True]
    assert [str(node.meta.get("val")) for node in first.gm.graph.nodes] == [
        str(node.meta.get("val")) for node in second.gm.graph.nodes
    ]
    assert first.gm.code == second.gm.code
    for check in ("sizes", "orders", "entries", "absent", "cells", "borrowed", "forms", "contents", "dicts", "hooks"):
        names = [sorted(map(str, getattr(graph.guards, check).names)) for graph in (first, second)]
        assert names[0] == names[1], check


def test_a_file_that_is_spoiled_is_no_file(taken, tmp_path):
    train(tied)
    for path in (tmp_path / "traces").glob("*.trace"):
        path.write_bytes(path.read_bytes()[:-7])
    train(tied)
    assert not taken


def test_a_file_names_nothing_that_has_no_place_there():
    with pytest.raises(TraceNotKept, match=r"names builtins\.eval"):
        pickling.Unpickler(io.BytesIO()).find_class("builtins", "eval")
    with pytest.raises(TraceNotKept, match=r"names os\.system"):
        pickling.Unpickler(io.BytesIO()).find_class("os", "system")


def some(values):
    return [pytest.param(each, marks=() if not at % FEW else pytest.mark.slow) for at, each in enumerate(values)]


@pytest.mark.parametrize("cell", some(CELLS), ids=str)
def test_what_was_traced_with_other_values_is_not_taken(cell, taken):
    source = Program((Site(cell, "in the step", (1,)),)).source
    with frozen(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for is_altered in (False, True):
            make = _load(source)
            (ours, weights, told, *changes), (theirs, others, also_told, *other_changes) = make(), make()
            if is_altered:
                changes[0][0]()
                other_changes[0][0]()
            step = Step(ours, build=interpret)
            for call in range(3):
                x = torch.randn(2, 2, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
                assert_same(step(x.clone()), theirs(x.clone()), name="result")
                assert_same(weights[0], others[0], name="weight")
                assert_same(told(), also_told(), name="effect")


def _times(k, x):
    return x * k


def _module(factor):
    class Block(nn.Module):
        def forward(self, x):
            return x * factor

    return Block()


def _modules(value):
    """Of one class, or of two that have one name."""
    first, second = _module(2.0), _module(3.0)
    return first, type(first if value == 2 else second)(), second


def _number(value):
    class Number(float):
        pass

    return Number(value)


def _level(value):
    return enum.IntEnum("Level", {"HIGH": int(value)}).HIGH


def _cached(value):
    answer = functools.cache(lambda: value)
    answer()
    return answer


def _with_method(value):
    methods = {2.0: lambda x: x * 2, 3.0: lambda x: x * 3}
    return type("Held", (), {"scale": staticmethod(methods[value]), "both": tuple(methods.values())})


def _named(value):
    def function():
        pass

    function.__name__ = "f" * int(value)
    return function


def _annotated(value):
    def function(k: value = value):
        return value

    def other(k: value = value):
        return value, 1.5, "more"

    return function if value == 2 else other


def _called(value):
    return type("Held", (), {"__call__": abs} if value == 2 else {})()


def _compared(value):
    kind = type("Held", (), {"__eq__": lambda *_: True, "__hash__": None} if value == 2 else {})
    return [kind(), kind()]


def _steps(value):
    functions = [lambda x: x * 2, lambda x: x * 3]
    return *functions, Step(functions[value == 3], build=interpret)


HELD = {  # what the step holds, for a number, and how it reads that
    "arguments of a partial": (lambda value: functools.partial(_times, value), lambda held, x: held(x)),
    "a number of a class": (_number, lambda held, x: x * held),
    "a number in an enumeration": (_level, lambda held, x: x * held),
    "a text of a class": (lambda value: type("Text", (str,), {})(value), lambda held, x: x * float(held)),
    "the answer of a cache": (_cached, lambda held, x: x * held()),
    "what is wrapped": (_with_method, lambda held, x: held.both[0](x) * held.both[1](x) + held.scale(x)),
    "classes of one name": (_modules, lambda held, x: held[0](x) * held[1](x)),
    "the order of a frozenset": (
        lambda value: frozenset([8, 0, 16] if value == 2 else [16, 0, 8]),
        lambda held, x: functools.reduce(lambda total, each: total * 1.5 + each, held, x),
    ),
    "what NumPy knows of a type": (
        lambda value: np.finfo(np.float32 if value == 2 else np.float64),
        lambda held, x: x + float(held.eps) * 1e8,
    ),
    "what PyTorch knows of a type": (
        lambda value: torch.finfo(torch.float16 if value == 2 else torch.float32),
        lambda held, x: x + held.eps,
    ),
    "a length at most": (lambda value: deque([1.0], int(value)), lambda held, x: x * held.maxlen),
    "what an exception was given": (ValueError, lambda held, x: x * held.args[0]),
    "another step": (_steps, lambda held, x: held[0](x) * held[1](x) + held[2](x)),
    "what a function is called": (_named, lambda held, x: x * len(held.__name__)),
    "what a function is annotated with": (_annotated, lambda held, x: x * held.__annotations__["k"]),
    "defaults of a function": (_annotated, lambda held, x: x * held.__defaults__[0]),
    "code of a function": (_annotated, lambda held, x: x * len(held.__code__.co_consts)),
    "what a closure of another holds": (_annotated, lambda held, x: x * held.__closure__[0].cell_contents),
    "a list that indexes a tensor": (lambda value: [0] * int(value), lambda held, x: x[..., held]),
    "a special method": (_called, lambda held, x: x * 2 if callable(held) else x),
    "a method by which C compares": (_compared, lambda held, x: x * (2 + held.index(held[-1]))),
    "a pattern": (lambda value: re.compile(f"{value:.0f}"), lambda held, x: x * (2 if held.match("2") else 3)),
    "a thread's own": (lambda value: _local(value), lambda held, x: x * held.value),
    "the first of a dict": (
        lambda value: {key: key for key in ([2.0, 3.0] if value == 2 else [3.0, 2.0])},
        lambda held, x: x * next(iter(held)),
    ),
    "a number deep in lists": (lambda value: [[[[[value]]]]], lambda held, x: x * torch.tensor(held).sum()),
}


def _local(value):
    local = threading.local()
    local.value = value
    return local


@pytest.mark.parametrize("what", HELD)
def test_what_python_never_changes_within_a_process_is_compared(what, taken):
    make, read = HELD[what]

    def step_of(value):
        held = make(value)
        return lambda x: read(held, x).sum()

    x = torch.ones(2)
    wanted = []
    for value in (2.0, 3.0):
        function = step_of(value)
        step = Step(function, build=interpret)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            results = [step(x) for _ in range(3)]
        wanted.append(function(x))
        assert_same(results[-1], wanted[-1], name="result")
    assert not torch.equal(*wanted)
    assert not any(taken)


class Shown:
    pass


NAMES, SHOWN, MODE = {"a", "bb", "ccc"}, Shown(), " ".join(["a", "b"])

FLEETING = {  # what gives something else in each process
    "going through a set": (lambda x: functools.reduce(lambda y, name: y * len(name) + 1, NAMES, x), "order of a set"),
    "a loop over a set": (lambda x: sum(at * len(name) * x for at, name in enumerate(NAMES)), "order of a set"),
    "a set that the step makes": (lambda x: x * len(next(iter({"a", "bb", f"{MODE}c"}))), "order of a set"),
    "popping": (lambda x: x * len({*sorted(NAMES)}.pop()), "order of a set"),
    "text of a set": (lambda x: x * f"{[NAMES]}".index("bb"), "order of a set"),
    "hash": (lambda x: x * (hash("a") % 7), r"builtins\.hash"),
    "id": (lambda x: x * (next(map(id, [SHOWN])) % 7), r"builtins\.id"),
    "an address": (lambda x: x * len(f"{SHOWN}"), "address of a Shown"),
    "dir": (lambda x: x * len(dir(SHOWN)), r"builtins\.dir"),
    "one object or two": (lambda x: x * 2 if MODE is NAME else x, "two equal str"),
    "what is registered": (lambda x: x * 2 if isinstance(SHOWN, Sized) else x, "registered with Sized"),
    "a NaN among others": (lambda x: x * 2 if NAN in [NAN] else x, "two NaNs"),
    "the process": (lambda x: x * (os.getpid() % 7), r"posix\.getpid"),
    "decimal": (lambda x: x * float(decimal.Decimal(1) / 3), r"decimal\.Decimal"),
}
NAME, NAN = "a b", float("nan")


@pytest.mark.parametrize("what", FLEETING)
def test_what_is_another_in_each_process_is_not_kept(what, taken, tmp_path):
    function, reason = FLEETING[what]
    step, x = Step(function, build=interpret), torch.ones(2)
    for _ in range(3):
        assert_same(step(x), function(x), name="result")
    assert not [*(tmp_path / "traces").iterdir()]
    assert any(re.search(f"not kept on disk: .*{reason}", line) for line in step.history)


STEADY = {  # what looks like that, and is not
    "what is in a set": lambda x: x * len(NAMES) if "a" in NAMES and {"bb"} <= NAMES else x,
    "a sorted set": lambda x: functools.reduce(lambda y, name: y * len(name), sorted(NAMES), x),
    "a set of numbers": lambda x: functools.reduce(lambda y, each: y * 2 + each, {3, 1, 2}, x),
    "one object": lambda x: x * 2 if SHOWN is not NAMES else x,
}


@pytest.mark.parametrize("what", STEADY)
def test_what_is_the_same_in_each_process_is_kept(what, taken):
    for _ in range(2):
        step, x = Step(STEADY[what], build=interpret), torch.ones(2)
        for _ in range(2):
            assert_same(step(x), STEADY[what](x), name="result")
    assert taken == [True]


def test_nothing_is_kept_while_others_have_their_code_among_pytorchs(taken, tmp_path):
    table = global_decomposition_table["post_autograd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table, torch.ops.aten.mish.default, lambda x: x * 2)
        train(tied)
    assert not [*(tmp_path / "traces").iterdir()]


def test_what_pytorch_registers_late_is_not_code_of_others(taken):
    torch.func.jacrev(torch.sin)(torch.ones(2))  # from now on vmap's decompositions are among PyTorch's operators
    train(tied)
    wrapped = functools.wraps(operator.add)(lambda *arguments: arguments)  # as in torch 2.11
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowerings, operator.add, wrapped)
        train(tied)
    assert taken == [True]


def test_a_folder_that_cannot_be_written_does_no_harm(taken, tmp_path, monkeypatch):
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "no folder"))
    assert not train(tied).refusals


def run_project(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    found = subprocess.run([sys.executable, folder / "main.py"], check=False, capture_output=True, text=True)
    assert not found.returncode, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the project, which a process has run, and the cache that it has left."""
    folder, cached = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("left")
    bring_compiled_code(cached)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WARM_START", "1"), ("TRACES", ""), ("CACHE_DIR", str(cached))):
            patch.setenv(f"MILLSTREAM_{name}", value)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setenv("PYTHONHASHSEED", "1")
        first = run_project(folder, FILES)
        assert not first["bad"]
        assert not first["taken"]
        yield folder, cached


@pytest.mark.parametrize("edit", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in EDITS)], ids=str)
def test_edits_between_processes_are_noticed(edit, project, tmp_path, monkeypatch):
    folder, cached = project
    shutil.copytree(cached, tmp_path / "cache")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    files = dict(FILES)
    if edit is not None:
        file, before, after = EDITS[edit]
        assert before in files[file]
        files[file] = files[file].replace(before, after, 1)
    second = run_project(folder, files)
    assert not second["bad"], second
    assert edit is not None or second["taken"] == [True], second
