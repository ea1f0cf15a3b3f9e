"""What runs is recorded exactly, changes nothing, and what was not seen is named."""

from __future__ import annotations

import argparse
import ast
import asyncio
import collections
import contextlib
import copy
import dataclasses
import difflib
import fractions
import functools
import gc
import io
import json
import operator  # noqa: F401  in the forms
import sys
import textwrap
import threading
import tokenize
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from millstream import _native
from millstream.capture.record.interpreter import instructions
from millstream.capture.record.location import Location
from millstream.capture.record.reads import MISSING, Kind
from millstream.capture.record.recorder import Recorder

pytestmark = pytest.mark.skipif(bool(instructions.why_not()), reason=instructions.why_not() or "it can be recorded")
ITEM, SLOT, CLASS, CELL = Kind.ITEM, Kind.SLOT, Kind.CLASS, Kind.CELL
LENGTH, CONTENTS, TYPE, CODE = Kind.LENGTH, Kind.CONTENTS, Kind.TYPE, Kind.CODE


def record(function, *arguments, follow=lambda filename: filename == __file__ or filename.startswith("<")):
    recorder = Recorder(follow, [function, *arguments])
    with recorder.recording():
        function(*arguments)
    return recorder


# --- reads ------------------------------------------------------------------------------------------------------------


class Plain:
    shared = 4

    def __init__(self):
        self.v = 1.5
        self.inner = {"k": [1, 2]}

    @property
    def double(self):
        return self.v * 2

    def __getitem__(self, key):
        return self.inner[key]

    def __add__(self, other):
        return self.v + other

    def __len__(self):
        return 3


class Slots:
    __slots__ = ("v", "w")

    def __init__(self):
        self.v = 2.5


@dataclasses.dataclass
class Point:
    x: float = 1.0
    y: float = 2.0


NS, BOX, SLOTS, POINT = types.SimpleNamespace(v=7), Plain(), Slots(), Point()
TABLE, ROW, SETS, QUEUE, EMPTY = {"a": 1, "b": 2.0}, [10, 20, 30], {5, 6}, collections.deque([1]), []
LIMIT = 0.25
FORMS = [  # an expression; holder, kind, key and value of what it reads, among others
    ("LIMIT", globals(), ITEM, "LIMIT", 0.25),
    ("NS.v", vars(NS), ITEM, "v", 7),
    ("BOX.v", vars(BOX), ITEM, "v", 1.5),
    ("BOX.shared", Plain, CLASS, "shared", 4),
    ("BOX.shared", vars(BOX), ITEM, "shared", MISSING),
    ("Plain.shared", Plain, CLASS, "shared", 4),
    ("BOX.double", vars(BOX), ITEM, "v", 1.5),
    ("BOX.double", BOX, TYPE, None, Plain),
    ("hasattr(BOX, 'none')", Plain, CLASS, "none", MISSING),
    ("hasattr(BOX, 'none')", vars(BOX), ITEM, "none", MISSING),
    ("getattr(NS, 'v'.strip())", vars(NS), ITEM, "v", 7),
    ("operator.attrgetter('v')(NS)", vars(NS), ITEM, "v", 7),
    ("SLOTS.v", SLOTS, SLOT, "v", 2.5),
    ("hasattr(SLOTS, 'w')", SLOTS, SLOT, "w", MISSING),
    ("TABLE['a']", TABLE, ITEM, "a", 1),
    ("TABLE.get('none')", TABLE, ITEM, "none", MISSING),
    ("'none' in TABLE", TABLE, ITEM, "none", MISSING),
    ("operator.itemgetter('b')(TABLE)", TABLE, ITEM, "b", 2.0),
    ("ROW[-1]", ROW, ITEM, 2, 30),
    ("ROW[1:]", ROW, CONTENTS, None, (10, 20, 30)),
    ("BOX['k']", vars(BOX)["inner"], ITEM, "k", [1, 2]),
    ("BOX['k']", Plain, CLASS, "__getitem__", Plain.__getitem__),
    ("BOX + 1", vars(BOX), ITEM, "v", 1.5),
    ("BOX + 1", Plain, CLASS, "__add__", Plain.__add__),
    ("1 if EMPTY else 2", EMPTY, LENGTH, None, 0),
    ("not EMPTY", EMPTY, LENGTH, None, 0),
    ("bool(BOX)", Plain, CLASS, "__len__", Plain.__len__),
    ("len(ROW)", ROW, LENGTH, None, 3),
    ("20 in ROW", ROW, CONTENTS, None, (10, 20, 30)),
    ("5 in SETS", SETS, CONTENTS, None, tuple(SETS)),
    ("[each for each in ROW]", ROW, CONTENTS, None, (10, 20, 30)),
    ("[*map(str, TABLE.items())]", TABLE, CONTENTS, None, ("a", "b", 1, 2.0)),
    ("sum(TABLE.values())", TABLE, CONTENTS, None, ("a", "b", 1, 2.0)),
    ("ROW + [1]", ROW, CONTENTS, None, (10, 20, 30)),
    ("ROW == [1]", ROW, CONTENTS, None, (10, 20, 30)),
    ("NS == 3", vars(NS), CONTENTS, None, ("v", 7)),
    ("f'{ROW}'", ROW, CONTENTS, None, (10, 20, 30)),
    ("'%s' % (ROW,)", ROW, CONTENTS, None, (10, 20, 30)),
    ("dict(**TABLE)", TABLE, CONTENTS, None, ("a", "b", 1, 2.0)),
    ("{**TABLE}", TABLE, CONTENTS, None, ("a", "b", 1, 2.0)),
    ("max(*ROW)", ROW, CONTENTS, None, (10, 20, 30)),
    ("sorted(QUEUE)", QUEUE, CONTENTS, None, (1,)),
    ("json.dumps({'t': TABLE})", TABLE, CONTENTS, None, ("a", "b", 1, 2.0)),
    ("copy.copy(ROW)", ROW, CONTENTS, None, (10, 20, 30)),
    ("dataclasses.asdict(POINT)", vars(POINT), ITEM, "x", 1.0),
    ("functools.partial(len, ROW)()", ROW, LENGTH, None, 3),
    ("helper()", None, CODE, None, None),
    ("kept()", None, CELL, None, 8),
]
STATEMENTS = [
    ("a, *b = ROW", ROW, CONTENTS, None, (10, 20, 30)),
    ("import json as j; j.dumps", sys.modules, ITEM, "json", json),
    ("match TABLE:\n    case {'b': got}: pass", TABLE, ITEM, "b", 2.0),
    ("match POINT:\n    case Point(1.0, y=got): pass", vars(POINT), ITEM, "y", 2.0),
    ("match ROW:\n    case [a, *b]: pass", ROW, LENGTH, None, 3),
    ("with contextlib.suppress(KeyError): TABLE['none']", TABLE, ITEM, "none", MISSING),
    ("class A(Plain): w = LIMIT", globals(), ITEM, "LIMIT", 0.25),
    ("exec('NS.v')", vars(NS), ITEM, "v", 7),
]


NAMES = [f"{form[0]}-{form[2].name}" for form in (*FORMS, *STATEMENTS)]


def helper(v=3):
    return v


def _keeping():
    value = 8
    return lambda: value


kept = _keeping()


def _has(recorder, holder, kind, key, value):
    return any(
        (holder is None or each.holder is holder)
        and each.kind is kind
        and each.key == key
        and (value is None or (each.value is value or each.value == value))
        for each in recorder.reads
        if isinstance(each.key, str | int | None)
    )


@pytest.mark.parametrize(("source", "holder", "kind", "key", "value"), [*FORMS, *STATEMENTS], ids=NAMES)
def test_a_read_is_recorded(source, holder, kind, key, value):
    function = types.FunctionType(_compiled(source).co_consts[0], globals())
    follow = lambda filename: "millstream/" not in filename  # noqa: E731
    assert _has(record(function, follow=follow), holder, kind, key, value)


def _compiled(source):
    return compile("def f():\n" + textwrap.indent(source, "    "), "<source>", "exec")


def test_nothing_else_is_recorded():
    def step():
        return NS.v * LIMIT

    names = {(each.kind, each.key) for each in record(step).reads if each.kind is not CLASS}
    assert names == {(ITEM, "NS"), (ITEM, "LIMIT"), (TYPE, None), (ITEM, "v")}


def test_what_the_step_has_written_or_made_is_no_read():
    box = types.SimpleNamespace(v=1, n=0)

    def step():
        box.v = 2
        own = {"v": box.v}
        box.n += 1
        return own["v"] + box.n

    recorder = record(step)
    assert [each.key for each in recorder.reads if each.holder is vars(box)] == ["n"]
    assert [(each.key, each.value) for each in recorder.writes] == [("v", 1), ("n", 0)]
    assert not [each for each in recorder.reads if each.kind is ITEM and each.key == "v"]


def test_a_class_that_the_step_changes_is_looked_up_again():
    kind = type("Kind", (), {"v": 1})
    first, second = kind(), kind()
    second.w = 2

    def step():
        before = first.v
        kind.v = property(lambda self: self.w)
        return before, second.v

    recorder = record(step)
    assert _has(recorder, vars(first), ITEM, "v", MISSING)
    assert _has(recorder, vars(second), ITEM, "w", 2)
    assert not _has(recorder, vars(second), ITEM, "v", MISSING)  # a property comes first


def test_what_is_old_or_new_stays_so_when_the_collector_is_at_work():
    gc.collect()
    old, young = types.SimpleNamespace(v=1), [types.SimpleNamespace(v=2)]

    def step():
        kept = [types.SimpleNamespace(v=3) for _ in range(10)]
        gc.collect(0)
        gc.collect()
        late = types.SimpleNamespace(v=4)
        return [each.v for each in (*kept, old, *young, late)]

    seen = [each.owner for each in record(step).reads if each.kind is ITEM and each.key == "v"]
    assert seen == [old, *young]


def test_what_the_collector_comes_to_know_in_the_step_was_there_before():
    table, box = {}, {"v": 1}

    def step():
        box["w"] = table["x"] = []
        return box["v"]

    gc.collect()
    assert not gc.is_tracked(table)
    recorder = record(step)
    assert _has(recorder, box, ITEM, "v", 1)
    assert any(each.holder is table and each.key == "x" for each in recorder.writes)


def test_all_objects_are_not_gone_through(monkeypatch):
    generations = []
    get_objects = gc.get_objects
    monkeypatch.setattr(
        gc, "get_objects", lambda generation=None: generations.append(generation) or get_objects(generation)
    )
    record(lambda: NS.v)
    assert generations
    assert set(generations) == {0}


def test_writes_have_their_old_values():
    box, table, row, shown = Plain(), {"a": 1, "b": 2}, [1, 2], set()
    count = 0

    def step():
        nonlocal count
        count += 1
        box.v = 5
        box.new = 6
        del table["a"]
        table.update(c=3)
        row[0] += 1
        row.append(4)
        shown.add(1)
        setattr(box, "in" + "ner", None)
        Plain.shared = Plain.shared

    inner = box.inner
    found = {(each.kind, id(each.holder) if each.key is None else each.key): each.value for each in record(step).writes}
    wanted = {
        (ITEM, "v"): 1.5,
        (ITEM, "new"): MISSING,
        (ITEM, "a"): 1,
        (CONTENTS, id(table)): ("b", 2),
        (ITEM, 0): 1,
        (CONTENTS, id(row)): (2, 2),
        (CONTENTS, id(shown)): (),
        (ITEM, "inner"): inner,
        (CLASS, "shared"): 4,
    }
    assert wanted.items() <= found.items()
    assert count == 1


# --- nothing changes --------------------------------------------------------------------------------------------------


def generator(n):
    for i in range(n):
        yield i * LIMIT
    return n


def delegating(n):
    return (yield from generator(n))


async def coroutine(n):
    await asyncio.sleep(0)
    return n


def work():
    source = Path(functools.__file__).read_text(encoding="utf-8")
    done = [ast.unparse(ast.parse(source))[:200]]
    lines = io.StringIO("def f(x):\n    return x + 1  # no\n" * 20)
    done.append(len([*tokenize.generate_tokens(lines.readline)]))
    done.append(json.dumps({"a": [1, {"b": None}]}, indent=2))
    done.append(textwrap.fill(source[:500], 40))
    done.append(str(fractions.Fraction(3, 4) + fractions.Fraction(1, 3)))
    done.append("\n".join(difflib.unified_diff("a b c".split(), "a c d".split())))
    done.append(copy.deepcopy({"x": [1, Point()]})["x"][1])
    done.append([*delegating(4)])
    done.append(asyncio.run(coroutine(4)))
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=int, default=3)
    done.append(parser.parse_args(["--x", "4"]).x)
    with contextlib.suppress(ZeroDivisionError):
        done.append(1 // 0)
    try:
        TABLE["none"]
    except KeyError as error:
        done.append((repr(error), error.__traceback__.tb_lineno))
    return done


def test_what_large_programs_compute_is_unchanged():
    wanted, got = work(), []
    recorder = record(lambda: got.extend(work()), follow=lambda filename: "millstream/" not in filename)
    assert recorder.failure == ""  # on Python 3.11 the depth of the stack was compared at each site
    assert got == wanted
    assert len([*recorder.codes]) > 100


def test_a_loop_is_told_of_once(monkeypatch):
    calls = []
    seen = Recorder._see
    monkeypatch.setattr(Recorder, "_see", lambda *args: calls.append(args[1].action) or seen(*args))

    def step():
        total = 0
        for _ in range(1000):
            total += NS.v + TABLE["a"] + ROW[1]
        return total

    record(step)
    assert len(calls) < 50


def test_a_generator_that_runs_already_is_recorded():
    def numbers():
        while True:
            yield LIMIT

    running = numbers()
    next(running)
    assert _has(record(lambda: next(running)), globals(), ITEM, "LIMIT", 0.25)


def test_other_threads_are_not_recorded():
    def step():
        thread = threading.Thread(target=lambda: NS.v)
        thread.start()
        thread.join()

    assert not _has(record(step), vars(NS), ITEM, "v", 7)


def test_nothing_is_recorded_in_a_pause_but_what_the_users_code_does_in_its_midst():
    recorder, box = Recorder(lambda filename: filename == __file__), {"v": 1}

    def call():
        with instructions.seen():
            (lambda: box["v"])()  # noqa: PLC3002  a frame of its own
        return NS.v

    def step():
        instructions.unseen(instructions.unseen, call)
        return LIMIT

    with recorder.recording():
        step()
    assert not _has(recorder, vars(NS), ITEM, "v", 7)
    assert _has(recorder, box, ITEM, "v", 1)
    assert _has(recorder, globals(), ITEM, "LIMIT", 0.25)


# --- beside others ----------------------------------------------------------------------------------------------------


def test_code_that_dynamo_has_marked_is_recorded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), LIMIT)
    disabled = torch._dynamo.disable(lambda: NS.v)

    def step(x):
        loss = model(x).sum() * disabled()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(2, 2)
    step(x)
    follow = lambda filename: "millstream/" not in filename  # noqa: E731
    before = {code.co_qualname for code in record(step, x, follow=follow).codes}
    torch.compile(step, backend="eager")(x)
    after = {code.co_qualname for code in record(step, x, follow=follow).codes}
    assert before <= after
    assert {"SGD.step", "Optimizer.zero_grad", "Linear.forward"} <= after
    assert any("<lambda>" in name for name in after)


@pytest.mark.parametrize("sees_instructions", [False, True])
def test_beside_a_tracer_both_see_all(sees_instructions):
    events = []

    def tracer(frame, event, _):
        if event == "call" and frame.f_code.co_name == "step":
            frame.f_trace_opcodes = sees_instructions
        if frame.f_code.co_name == "step":
            events.append((event, frame.f_lineno))
        return tracer

    def step():
        value = NS.v
        return value + 1

    def traced(function):
        events.clear()
        outer = sys.gettrace()
        sys.settrace(tracer)
        try:
            function()
            assert sys.gettrace() is tracer
        finally:
            sys.settrace(outer)
        return [*events]

    recorders = []
    traced(step)  # after which Python 3.12 tells of instructions
    wanted = traced(step)
    assert traced(lambda: recorders.append(record(step))) == wanted
    assert _has(recorders[0], vars(NS), ITEM, "v", 7)


def test_beside_a_profiler_both_see_all():
    called = []

    def step():
        return helper()

    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code)))
    try:
        recorder = record(step)
    finally:
        sys.setprofile(None)
    assert ("call", helper.__code__) in called
    assert _has(recorder, helper, CODE, None, None)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on a tracer is no concern of it")
def test_a_step_that_sets_a_tracer_is_named():
    outer = sys.gettrace()
    try:
        assert record(lambda: sys.settrace(lambda *_: None)).failure == "the step has set a tracer"
    finally:
        sys.settrace(outer)


def test_a_failure_is_raised_before_anything_goes_unseen(monkeypatch):
    def fail(*_):
        raise ValueError("no")

    monkeypatch.setattr(Recorder, "_attribute", fail)
    got = []
    with pytest.raises(ValueError, match="no"):
        record(lambda: got.append(NS.v))
    assert got == []


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(_native, "load", lambda name: None)
    monkeypatch.setattr(_native, "why_not", lambda name: "there is no compiler")
    recorder = record(lambda: NS.v)
    assert recorder.failure == "there is no compiler"
    assert recorder.reads == []


def test_what_the_collector_calls_is_none_of_it():
    counts, box = {"n": 0}, {"v": 1}

    def count(phase, info):
        counts["n"] += 1

    def function():
        gc.collect()
        return box["v"]

    gc.callbacks.append(count)
    try:
        recorded = record(function)
    finally:
        gc.callbacks.remove(count)
    assert counts["n"] >= 2
    assert not any(each.holder is counts for each in (*recorded.reads, *recorded.writes))
    assert any(each.holder is box for each in recorded.reads)


def test_what_threads_of_the_steps_do_is_not_known():
    box = {"v": 1}

    def change():
        box["v"] = 2

    def function(*, beside):
        if beside:
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()

    place = Location(box, "v", "box['v']")
    for beside in (False, True):
        recorded = record(functools.partial(function, beside=beside))
        assert recorded.has_written(place) is beside
        assert recorded.has_read(place) is beside
        assert recorded.has_looked_into(box) is beside


def test_code_that_began_in_a_pause_or_an_earlier_recording_is_seen():
    box = {"v": 1}

    def read():
        return box["v"]

    def function():
        instructions.unseen(read)
        instructions.unseen(textwrap.dedent, "")  # of no interest
        return read()

    for _ in range(3):
        recorder = Recorder(lambda filename: filename == __file__)
        with recorder.recording():
            function()
        assert [each.key for each in recorder.reads if each.holder is box] == ["v"]
        assert textwrap.dedent.__code__ not in recorder.codes
