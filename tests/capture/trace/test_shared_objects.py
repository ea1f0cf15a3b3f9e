"""Other threads and handlers of signals that use the very objects that a step reads and writes while it is traced."""

import asyncio
import collections
import contextlib
import copy
import ctypes
import gc
import io
import json
import logging
import math
import operator
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import millstream as ms
from millstream.capture import Step
from millstream.capture.trace.numbers.scalars import GraphScalar
from millstream.errors import CaptureError, FallbackWarning
from millstream.signals import signals_wait
from tests.capture.worlds import interpret
from tests.clocks import HANG_S

_C = ctypes.CDLL(None)  # functions of ``os`` that write are effects, which a step may not have
_raise, _write = getattr(_C, "raise"), _C.write


class Meanwhile:
    """Does something in another thread, whenever a step that is being traced calls ``pause``, which waits for that.

    Args:
        act: What it does.
        patience: Seconds that it waits.
        goes_on: Whether it waits until ``act`` calls ``go_on`` only.
    """

    def __init__(self, act, patience=HANG_S, *, goes_on=False):
        self._patience, self._goes_on = patience, goes_on
        (self._asked, self._ask), (self._answered, self._answer) = os.pipe(), os.pipe()
        self._act = act
        self.outcomes = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        os.close(self._ask)
        self._thread.join(HANG_S)
        for end in (self._asked, self._answered, self._answer):
            os.close(end)

    def _serve(self):
        while os.read(self._asked, 1):
            try:
                self.outcomes.append(self._act())
            except BaseException:  # noqa: BLE001 - raised in another thread
                self.outcomes.append(traceback.format_exc())
            if not self._goes_on:
                self.go_on()

    def go_on(self):
        os.write(self._answer, b"!")

    def pause(self):
        if torch.compiler.is_compiling():
            _write(self._ask, b"?", 1)
            if select.select([self._answered], [], [], self._patience)[0]:
                os.read(self._answered, 1)


class Slots:
    __slots__ = ("n",)


class Module(nn.Module):
    n = 0


def make_step(world, body, pause):
    world.model = nn.Linear(4, 2)
    world.optimizer = torch.optim.Adam(world.model.parameters(), 0.5)

    def step(x):
        loss = world.model(x).square().mean()
        loss.backward()
        world.optimizer.step()
        world.optimizer.zero_grad()
        result = body(world)
        pause()
        return loss if result is None else loss + result

    return Step(step, build=interpret)


READS = {
    "text": str,
    "shown": repr,
    "formatted": lambda n: f"{n:6.2f}",
    "percent": lambda n: "%.2f" % n,  # noqa: UP031
    "sum": lambda n: (n + 1, 1 + n, n - 0.5, 0.5 - n, n * n, n**2, 2**n, n / 4, 7 // n, n % 2, -n, +n, abs(n)),
    "comparison": lambda n: (n == 2, n != 2, n < 3, n >= 3, bool(n), sorted([n, 1]), max(n, 1), n in (2, 3)),
    "type": lambda n: (isinstance(n, int), isinstance(n, float), isinstance(n, str)),
    "plain": lambda n: (int(n), float(n), complex(n), round(n), round(n, 1), math.floor(n), math.sqrt(n)),
    "looked up": lambda n: {1: "a", 2: "b", 3: "c"}.get(n, "d"),
    "copied": lambda n: (copy.copy(n), copy.deepcopy([n]), pickle.loads(pickle.dumps(n))),
    "JSON": lambda n: json.dumps({"n": n}),
    "method": lambda n: (n.as_integer_ratio(), n.real, n.imag, divmod(7, n), divmod(n, 2)),
    "array": lambda n: (np.asarray([n, 1]).dtype, (np.ones(2) * n).tolist()),
    "tensor": lambda n: (torch.ones(2) * n).tolist(),
}
"""What people do with numbers."""

WHOLE = {
    "index": lambda n: ("abcdefgh"[n], "x" * n, [*range(n)], "abc"[:n]),
    "bits": lambda n: (n & 1, n | 4, n ^ 1, 1 & n, n << 1, 1 << n, n >> 1, ~n, n.bit_length()),
}
"""And with whole numbers alone."""

counted = 1


def test_numbers_of_a_step_are_plain_to_other_threads():
    """Whatever holds them, and as they were before the step, which has counted on."""
    global counted  # noqa: PLW0603
    counted = cell = 1
    world = types.SimpleNamespace(n=1, table={"n": 1}, items=[1], slots=Slots(), module=Module(), rate=0.5, early=[])
    world.slots.n = world.module.n = 1

    def count(world):
        nonlocal cell
        global counted  # noqa: PLW0603
        world.n += 1
        world.table["n"] += 1
        world.items[0] += 1
        world.slots.n += 1
        world.module.n += 1
        world.rate += 0.25
        counted += 1
        cell += 1

    def look():
        held = [world.n, world.table["n"], world.items[0], world.slots.n, world.module.n, counted, cell, world.rate]
        held.append(world.optimizer.param_groups[0]["lr"])
        return [
            {name: repr(read(n)) for name, read in (READS if isinstance(n, float) else READS | WHOLE).items()}
            for n in held
        ]

    with Meanwhile(look) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert not step.fallbacks
    assert len(step.graphs) == 1
    expected = [{name: repr(read(2)) for name, read in (READS | WHOLE).items()}] * 7
    expected += [{name: repr(read(n)) for name, read in READS.items()} for n in (0.75, 0.5)]
    assert meanwhile.outcomes[-1] == expected
    assert (world.n, world.table, world.items, counted, cell, world.rate) == (3, {"n": 3}, [3], 3, 3, 1.0)


def test_numbers_that_another_thread_keeps_are_plain_numbers_in_the_end():
    world, kept, others = types.SimpleNamespace(n=1), [], types.SimpleNamespace(table={})

    def count(world):
        world.n += 1

    def keep():
        kept.append(world.n)
        others.last = others.table["n"] = world.n
        return kept[0] * 2

    with Meanwhile(keep) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert meanwhile.outcomes == [4]
    assert kept == [2]
    assert {*map(type, (*kept, others.last, others.table["n"]))} == {int}
    assert len(step.graphs) == 1


def test_what_another_thread_does_with_numbers_it_keeps_while_they_become_plain_stands(monkeypatch):
    """That may be between any two lines of Python: here whenever a plain value is asked for."""

    class Proxy:
        __slots__ = ("n",)

        def __getattr__(self, name):
            asked.append(name)
            return vars(world)

    world, asked = types.SimpleNamespace(n=1, m=1), []
    proxy, items, moves, table = Proxy(), [], [], collections.defaultdict(lambda: "new")
    plain = GraphScalar.plain

    def consume(number):
        if number.questions.thread is None:  # the trace is over
            if items[-1] is number:
                items.insert(0, "mine")
            if table.get(len(moves)) is number:
                table[len(moves) + 1] = table.pop(len(moves))
                moves.append(1)
        return plain(number)

    def count(world):
        world.n += 1
        world.m += 1

    def keep():
        proxy.n = world.n
        table[0] = world.m
        items.append(world.n)

    monkeypatch.setattr(GraphScalar, "plain", consume)
    with Meanwhile(keep) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert moves
    assert items == [*["mine"] * (len(items) - 1), 2] != [2]
    assert (table, asked) == ({len(moves): 2}, [])
    assert len(step.graphs) == 1


def test_a_value_of_a_later_moment_is_what_it_was():
    world = types.SimpleNamespace(last=0.0, scale=torch.full((), 3.0))

    def read(world):
        world.last = (world.scale * 2).item()

    def look():
        return f"{world.last:.1f} {round(world.last)}", world.last + 1, json.dumps(world.last), float(world.last)

    with Meanwhile(look) as meanwhile:
        step = make_step(world, read, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert {*meanwhile.outcomes} == {("6.0 6", 7.0, "6.0", 6.0)}
    assert step.graphs
    assert world.last == 6.0


MAKES = {
    "operation": lambda: torch.ones(2) * 2,
    "named tuple": lambda: (torch.ones(2, 1) * 2).max(1).values,
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_tensor_that_a_step_has_made_is_the_one_before_in_another_thread_or_else_an_error(make, is_new):
    world = types.SimpleNamespace(kept=torch.zeros(2))

    def keep(world):
        world.kept = MAKES[make]()

    def look():
        kept = world.kept
        meanwhile.go_on()
        try:
            return kept.sum().item()
        except CaptureError as error:
            return "no values. At" in str(error), error.remedy

    with Meanwhile(look, goes_on=True) as meanwhile:
        step = make_step(world, keep, meanwhile.pause)
        step(torch.ones(3, 4))
        if is_new:
            del world.kept
        step(torch.ones(3, 4))
    assert {*meanwhile.outcomes} == {(True, "Take it anew from where you have it.") if is_new else 4.0}
    assert world.kept.tolist() == [2.0, 2.0]
    assert step.graphs


def test_a_value_where_there_was_none_is_an_error_until_the_call_is_over():
    world = types.SimpleNamespace(scale=torch.full((), 3.0))

    def read(world):
        world.new = (world.scale * 2).item()

    def look():
        try:
            return float(world.new)
        except CaptureError as error:
            return error.remedy

    with Meanwhile(look) as meanwhile:
        step = make_step(world, read, meanwhile.pause)
        step(torch.ones(3, 4))
        del world.new
        for _ in range(3):
            step(torch.ones(3, 4))
    assert meanwhile.outcomes[0] == "Read it again after that call."
    assert meanwhile.outcomes[-1] == world.new == 6.0


def test_a_number_that_pytorch_cannot_take_is_an_error_that_says_what_it_takes():
    world = types.SimpleNamespace(n=1)

    def count(world):
        world.n += 1

    def look():
        try:
            return torch.full((1,), world.n).item()
        except CaptureError as error:
            return torch.full((1,), int(world.n)).item() if "int(number)" in error.remedy else error

    with Meanwhile(look) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert meanwhile.outcomes == [2]


# --- what others write ------------------------------------------------------------------------------------------------


class Kind:
    setting = 1


flag = 1


def make_holders():
    """All kinds of holders, each with numbers and other values."""
    world = types.SimpleNamespace(n=1, text="a", table={"n": 1}, items=[1], queue=collections.deque([1]), names={"a"})
    world.slots, world.module, world.kind, world.unread = Slots(), Module(), type("Kind", (Kind,), {}), 0
    world.slots.n = world.module.n = world.kind.setting = 1
    return world


def read_all(world, cell):
    return float(
        sum(world.table.values()) + sum(world.items) + sum(world.queue) + len(world.names) + len(world.text)
        + world.n + world.slots.n + world.module.n + world.kind.setting + flag + cell()
    )  # fmt: skip


def test_what_another_thread_writes_once_is_there_and_counts():
    """Whatever holds it: as numbers, in containers, and what the step has no use for."""
    global flag  # noqa: PLW0603
    flag = cell = 1
    world, once = make_holders(), [1]

    def write():
        nonlocal cell
        global flag  # noqa: PLW0603
        world.unread += 1
        if once:
            once.clear()
            world.n = world.slots.n = world.module.n = world.kind.setting = flag = cell = 10
            world.table["n"], world.table["new"] = 10, 10
            world.items[0] = 10
            world.items.append(10)
            world.queue.append(10)
            world.names.add("b")
            world.text = "bb"
            world.optimizer.param_groups[0]["lr"] = 0.25

    with Meanwhile(write) as meanwhile:
        step = make_step(world, lambda world: read_all(world, lambda: cell), meanwhile.pause)
        results = [step(torch.zeros(3, 4)).item() for _ in range(4)]
    plain = world.model(torch.zeros(3, 4)).square().mean().item()
    assert results[-1] - plain == pytest.approx(115, abs=0.5)
    assert (world.n, world.slots.n, world.module.n, world.kind.setting, flag, cell) == (10,) * 6
    assert (world.table, world.items, [*world.queue]) == ({"n": 10, "new": 10}, [10, 10], [1, 10])
    assert (world.names, world.text, world.optimizer.param_groups[0]["lr"]) == ({"a", "b"}, "bb", 0.25)
    assert world.unread == len(meanwhile.outcomes)
    assert not step.fallbacks
    assert step.graphs


READS_BY_NAME = {
    "getattr": lambda world: getattr(world.inner, world.key),
    "attrgetter": lambda world: operator.attrgetter(world.key)(world.inner),
    "an attribute of such": lambda world: getattr(getattr(world, world.part), world.key),
    "vars": lambda world: vars(world.inner)["scale"],
    "__dict__": lambda world: sum(world.inner.__dict__.values()),
}


@pytest.mark.parametrize("read", READS_BY_NAME)
def test_what_another_thread_writes_after_it_was_read_by_a_computed_name_counts(read):
    world, once = make_holders(), [1]
    world.inner, world.part, world.key = types.SimpleNamespace(**{"".join("scale"): 1.0}), "inner", "".join("scale")

    def write():
        if once:
            once.clear()
            vars(world.inner).update({world.key: 10.0})

    with Meanwhile(write) as meanwhile:
        step = make_step(world, READS_BY_NAME[read], meanwhile.pause)
        results = [step(torch.zeros(3, 4)).item() for _ in range(4)]
    plain = world.model(torch.zeros(3, 4)).square().mean().item()
    assert results[-1] - plain == pytest.approx(10, abs=0.5)
    assert world.inner.scale == 10.0
    assert step.graphs


def test_what_a_step_has_no_use_for_may_change_all_the_time():
    world = make_holders()

    def write():
        world.unread += 1
        world.later = world.unread

    with Meanwhile(write) as meanwhile:
        step = make_step(world, lambda world: float(world.n), meanwhile.pause)
        for _ in range(3):
            step(torch.ones(3, 4))
    assert (world.unread, world.later, len(meanwhile.outcomes)) == (1, 1, 1)
    assert len(step.graphs) == 1


def test_what_two_count_on_at_once_is_the_sum():
    """Another thread counts wherever the step does, in every trace: the step falls back, and nothing is lost."""
    global flag  # noqa: PLW0603
    flag = cell = 1
    world = make_holders()

    def count(world, by=1):
        nonlocal cell
        global flag  # noqa: PLW0603
        world.n += by
        world.slots.n += by
        world.module.n += by
        world.table["n"] += by
        flag += by
        cell += by

    with Meanwhile(lambda: count(world, 100)) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        with pytest.warns(
            FallbackWarning, match=r"Another thread writes to .* while the step is captured\. Let it wait"
        ):
            for _ in range(3):
                step(torch.ones(3, 4))
    expected = 1 + 3 + 100 * len(meanwhile.outcomes)
    assert (world.n, world.slots.n, world.module.n, world.table["n"], flag, cell) == (expected,) * 6


def test_what_another_thread_counts_before_the_step_does_is_counted_once():
    """What the step adds in a trace to a plain number is not taken for the other thread's, too."""
    world = make_holders()

    def add(by):
        world.n += by
        world.table["n"] += by
        world.module.n += by

    def count(world):
        add(1)
        meanwhile.pause()
        add(1)

    with Meanwhile(lambda: add(100)) as meanwhile:
        step = make_step(world, count, lambda: None)
        with pytest.warns(FallbackWarning, match="Another thread writes to .* while the step is captured"):
            for _ in range(3):
                step(torch.ones(3, 4))
    expected = 1 + 6 + 100 * len(meanwhile.outcomes)
    assert (world.n, world.table["n"], world.module.n) == (expected,) * 3


def test_what_another_thread_counts_once_before_the_step_does_is_counted_once():
    world, is_over = make_holders(), []

    def add():
        if not is_over:
            is_over.append(1)
            world.n += 100

    def count(world):
        meanwhile.pause()
        world.n += 1

    with Meanwhile(add) as meanwhile:
        step = make_step(world, count, lambda: None)
        for _ in range(3):
            step(torch.ones(3, 4))
    assert world.n == 104
    assert len(step.graphs) == 1


ticks = 1.0


def beating(kind):
    """An object with a time in it, how another thread sets that, and how a step reads it in the branch ``if told``."""
    slots, told = Slots(), False
    held, cell = types.SimpleNamespace(n=1.0, told=told), 1.0
    slots.n = 1.0

    def beat():
        nonlocal cell
        global ticks  # noqa: PLW0603
        held.n = slots.n = cell = ticks = time.time()

    reads = {
        "attribute": lambda told: held.n if told else 0.0,
        "slot": lambda told: slots.n if told else 0.0,
        "closure": lambda told: cell if told else 0.0,
        "global": lambda told: ticks if told else 0.0,
        "getattr": lambda told: getattr(held, "n") if told else 0.0,  # noqa: B009
        "vars": lambda told: vars(held)["n"] if told else 0.0,
    }
    return beat, reads[kind]


def run_beside_a_beat(kind, *, told):
    """A step called thrice, while another thread sets a time before and after each place where it may be read."""
    beat, read = beating(kind)
    with Meanwhile(beat) as meanwhile:

        def body(world):
            meanwhile.pause()
            return read(told=told)

        step = make_step(types.SimpleNamespace(), body, meanwhile.pause)
        for _ in range(3):
            step(torch.ones(3, 4))
    return step


@pytest.mark.parametrize("kind", ["attribute", "slot", "closure", "global", "getattr"])
def test_what_another_thread_writes_all_the_time_may_stand_in_a_branch_that_is_not_taken(kind):
    step = run_beside_a_beat(kind, told=False)
    assert not step.fallbacks
    assert len(step.graphs) == 1
    assert sys.gettrace() is None


@pytest.mark.parametrize("kind", ["attribute", "slot", "closure", "global", "getattr", "vars"])
def test_what_another_thread_writes_all_the_time_is_refused_where_it_is_read(kind):
    with pytest.warns(FallbackWarning, match="Another thread writes to .* while the step is captured"):
        step = run_beside_a_beat(kind, told=True)
    assert not step.graphs


num_collected, collected_at = 0, 0.0


class Collected:
    """Counts what Python's collector does, and when: in globals of a module that a step may reach."""

    def note(self, phase, info):
        global num_collected, collected_at  # noqa: PLW0603
        num_collected += 1
        collected_at = time.perf_counter()

    __call__ = note


@pytest.mark.parametrize("kind", ["function", "method", "object"])
def test_what_the_collector_calls_is_no_part_of_a_step(kind):
    """Numbers that it counts are no inputs of a graph, and it meets none of tracing's."""
    tell = {"function": lambda *args: Collected().note(*args), "method": Collected().note, "object": Collected()}[kind]
    world, threshold, before = make_holders(), gc.get_threshold(), num_collected
    gc.callbacks.append(tell)
    gc.set_threshold(20)  # often
    try:
        with Meanwhile(lambda: None) as meanwhile:
            step = make_step(world, lambda world: float(world.n), meanwhile.pause)
            for _ in range(3):
                step(torch.ones(3, 4))
    finally:
        gc.callbacks.remove(tell)
        gc.set_threshold(*threshold)
    assert not step.fallbacks
    assert len(step.graphs) == 1
    assert num_collected > before
    assert type(num_collected) is int


@contextlib.contextmanager
def collector_counts():
    """The collector's work is told to a function that fills a list, while Python collects whenever it may."""
    seen, threshold = [], gc.get_threshold()

    def note(phase, info):
        seen[len(seen) :] = [phase]

    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert seen


@contextlib.contextmanager
def log_is_read():
    """All that PyTorch logs comes to a handler that fills a dictionary."""
    noted, note = os.pipe()

    class Handler(logging.Handler):
        def emit(self, record):
            seen = {}
            seen[record.name] = record
            _write(note, b"!", 1)

    logger, handler = logging.getLogger("torch"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        assert select.select([noted], [], [], 0)[0]
        os.close(noted), os.close(note)


@pytest.mark.parametrize("beside", [contextlib.nullcontext, collector_counts, log_is_read])
def test_a_list_that_grows_all_the_time_is_no_part_of_a_graph(beside):
    world = make_holders()
    with Meanwhile(lambda: world.items.append(1)) as meanwhile, beside():
        step = make_step(world, lambda world: float(sum(world.items)), meanwhile.pause)
        with pytest.warns(FallbackWarning, match=r"Another thread writes to world\.items while"):
            for _ in range(3):
                step(torch.ones(3, 4))
    assert len(world.items) == 1 + len(meanwhile.outcomes)
    calm = make_step(world, lambda world: float(sum(world.items)), lambda: None)
    for _ in range(2):
        calm(torch.ones(3, 4))
    assert calm.graphs


def test_what_another_thread_sets_once_is_what_the_step_goes_on_from():
    world, traces = types.SimpleNamespace(n=1), []

    def count(world):
        world.n = 0 if world.n > 50 else world.n + 1

    def write():
        traces.append(1)
        if len(traces) == 2:
            world.n = 30

    with Meanwhile(write) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert world.n == 31
    assert not step.fallbacks
    assert len(step.graphs) == 1


def test_what_two_set_at_once_is_told():
    """The step puts a plain number where another thread puts one: which of them came last nobody can say."""
    world, traces = types.SimpleNamespace(n=1, m=1), []

    def count(world):
        world.n = 0
        world.m += 1
        world.n = world.m + 1

    def write():
        traces.append(1)
        if len(traces) == 2:
            world.n = 30

    with Meanwhile(write) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        step(torch.ones(3, 4))
        with pytest.warns(FallbackWarning, match=r"may write to world\.n, and so did another thread .* is lost\. Let"):
            step(torch.ones(3, 4))
    assert (world.n, world.m) == (4, 3)


def test_what_the_step_itself_sets_is_the_steps_with_other_threads_about():
    def run(wrap):
        world = make_holders()

        def change(world):
            world.table["n"] = 0
            world.items[0] += 1
            world.text = "b" if world.text == "a" else "a"
            world.n = 0 if world.n == 3 else world.n + 1
            return world.items[0] * 0.5

        with Meanwhile(lambda: None) as meanwhile:
            step = make_step(world, change, meanwhile.pause)
            step = step if wrap else step.function
            results = [step(torch.zeros(1, 4)).item() for _ in range(8)]
        return world.table, world.items, world.text, world.n, [round(result) for result in results]

    torch.manual_seed(0)
    captured = run(wrap=True)
    torch.manual_seed(0)
    assert captured == run(wrap=False)


# --- handlers of signals ----------------------------------------------------------------------------------------------


@pytest.fixture
def handle():
    """Sets handlers, and puts those back that there were."""
    before = {}

    def set_handler(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield set_handler
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def signals():
    """Something that sends signals from within a step that is being traced, once, and counts how often it was asked."""
    waiting, send = os.pipe()
    passed, note = os.pipe()

    class Signals:
        def prepare(self, *numbers):
            os.write(send, bytes(numbers))

        def pause(self):
            if torch.compiler.is_compiling():
                while select.select([waiting], [], [], 0)[0]:
                    _raise(os.read(waiting, 1)[0])
                _write(note, b"!", 1)

        def num_passed(self):
            return len(os.read(passed, 99)) if select.select([passed], [], [], 0)[0] else 0

    yield Signals()
    for end in (waiting, send, passed, note):
        os.close(end)


def test_a_handler_finds_and_leaves_what_is_real(handle, signals):
    world = types.SimpleNamespace(n=0, stop=False, seen=[])

    def count(world):
        world.n += 1
        return 100.0 if world.stop else 0.0

    def stop(number, frame):
        world.stop = True
        world.seen.append((number, f"{world.n}", type(world.n), world.model.weight.sum().item()))

    handle(signal.SIGUSR1, stop)
    handle(signal.SIGUSR2, stop)
    step = make_step(world, count, signals.pause)
    signals.prepare(signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1)
    step(torch.ones(3, 4))
    weight = world.model.weight.sum().item()
    step(torch.ones(3, 4))
    assert step(torch.ones(3, 4)) > 100
    assert sorted(world.seen) == [(number, "1", int, weight) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    assert world.stop
    assert world.n == 3
    assert not step.fallbacks
    assert signal.getsignal(signal.SIGUSR1) is stop


def test_what_a_handler_raises_comes_from_the_call_with_everything_as_before(handle, signals):
    class TooLateError(Exception):
        pass

    def fail(number, frame):
        raise TooLateError

    world = types.SimpleNamespace(n=0)

    def count(world):
        world.n += 1

    handle(signal.SIGALRM, fail)
    step = make_step(world, count, signals.pause)
    signals.prepare(signal.SIGALRM)
    step(torch.ones(3, 4))
    before = world.model.weight.tolist()
    with pytest.raises(TooLateError):
        step(torch.ones(3, 4))
    assert world.n == 1
    assert world.model.weight.tolist() == before
    step(torch.ones(3, 4))
    assert world.n == 2
    assert len(step.graphs) == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_handler_may_wait_for_a_thread_that_waits_for_the_step(is_refused, handle, signals):
    """What that thread has kept is real by then, too."""
    world, kept, is_done, seen = types.SimpleNamespace(n=1, kept=torch.zeros(2)), [], threading.Event(), []

    def change(world):
        world.n += 1
        world.kept = torch.ones(2) * 2

    def look():
        kept.append(world.n)
        try:
            world.kept.sum()
        finally:
            is_done.set()

    handle(signal.SIGTERM, lambda number, frame: seen.append((is_done.wait(HANG_S), [*map(type, kept)])))
    with Meanwhile(look, patience=0.2) as meanwhile:

        def pause():
            meanwhile.pause()
            signals.pause()
            if is_refused and [0, 0][torch.rand(2).argmax().item()]:
                world.n = 0

        step = make_step(world, change, pause)
        signals.prepare(signal.SIGTERM)
        step(torch.ones(3, 4))
        with pytest.warns(FallbackWarning) if is_refused else contextlib.nullcontext():
            step(torch.ones(3, 4))
    assert seen == [(True, [int] * len(kept))]
    assert kept
    assert bool(step.graphs) is not is_refused


def test_a_signal_that_asyncio_handles_is_handled_once(signals):
    handled, step = [], make_step(types.SimpleNamespace(), lambda world: None, signals.pause)

    async def train():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.append, 1)
        step(torch.ones(3, 4))
        signals.prepare(signal.SIGUSR1)
        step(torch.ones(3, 4))
        for _ in range(9):  # turns of the loop
            await asyncio.sleep(0)

    asyncio.run(train())
    assert handled == [1]
    assert step.graphs


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_waits_and_a_second_one_does_not(presses, handle, signals):
    handle(signal.SIGINT, signal.default_int_handler)
    world = types.SimpleNamespace(n=0)

    def count(world):
        world.n += 1

    step = make_step(world, count, signals.pause)
    signals.prepare(*[signal.SIGINT] * presses)
    step(torch.ones(3, 4))
    before = world.model.weight.tolist()
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(3, 4))
    assert (signals.num_passed() > 0) is (presses == 1)
    assert world.n == 1
    assert world.model.weight.tolist() == before
    step(torch.ones(3, 4))
    assert world.n == 2
    assert len(step.graphs) == 1


class TooSoonError(Exception):
    pass


def make_step_that_is_built(during):
    """A step whose graph is built, among fake tensors, by what calls ``during`` first, and so does its first run."""
    world = types.SimpleNamespace(n=0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def build(gm, inputs, static):
        run = interpret(gm, inputs, static)
        with FakeTensorMode():
            during("built")

        def executable(values):
            results = run(values)
            during("run")
            return results

        return executable

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        world.n += 1
        return loss

    step = Step(step, build=build)
    step(torch.ones(3, 4))
    model.weight.grad = torch.ones(2, 4)
    return step, model, world


def all_of(model, world):
    return world.n, model.weight.tolist(), model.weight.grad.tolist()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("stage", ["built", "run"])
def test_a_handler_waits_until_a_graph_is_built_and_has_run(stage, raises, handle):
    waiting, seen = [stage], []

    def during(now):
        if now in waiting:
            waiting.remove(now)
            _raise(signal.SIGUSR1)

    def look(number, frame):
        seen.append((model.weight + 1).sum().item())
        if raises:
            raise TooSoonError

    handle(signal.SIGUSR1, look)
    step, model, world = make_step_that_is_built(during)
    before = all_of(model, world)
    with pytest.raises(TooSoonError) if raises else contextlib.nullcontext():
        step(torch.ones(3, 4))
    assert not waiting
    assert len(seen) == 1
    if raises:
        assert all_of(model, world) == before
        step(torch.ones(3, 4))
    assert world.n == 2
    assert model.weight.grad is None
    assert len(step.graphs) == 1
    assert not step.fallbacks


@pytest.mark.parametrize("is_caught", [False, True])
def test_an_interrupt_comes_from_the_compiler_at_once_and_even_where_that_catches_it(is_caught, handle):
    waiting = ["built"]

    def during(now):
        if now in waiting:
            waiting.remove(now)
            with contextlib.suppress(KeyboardInterrupt if is_caught else ()):
                _raise(signal.SIGINT)
                waiting.append("it waited")

    handle(signal.SIGINT, signal.default_int_handler)
    step, model, world = make_step_that_is_built(during)
    before = all_of(model, world)
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(3, 4))
    assert not waiting
    assert all_of(model, world) == before
    step(torch.ones(3, 4))
    assert (world.n, len(step.graphs)) == (2, 1)


def in_a_child(check):
    """What ``check`` returns in a forked child, in which all else comes to an end."""
    get, put = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(put, repr(check()).encode())
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(put, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(put)
    os.waitpid(child, 0)
    said = os.read(get, 9999).decode()
    os.close(get)
    return said


@pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning")
def test_a_child_that_another_thread_forks_during_a_trace_finds_what_was_there_before(handle):
    def stop(number, frame):
        pass

    handle(signal.SIGUSR1, stop)
    world = types.SimpleNamespace(n=0)

    def count(world):
        world.n += 1

    def look():
        is_real = type(world.model.weight) is nn.Parameter and (world.model.weight + 1).isfinite().all().item()
        return is_real, type(world.n), signal.getsignal(signal.SIGUSR1) is stop, torch.compiler.is_compiling()

    with Meanwhile(lambda: in_a_child(look), patience=0.2) as meanwhile:
        step = make_step(world, count, meanwhile.pause)
        for _ in range(3):
            step(torch.ones(3, 4))
    assert {*meanwhile.outcomes} == {repr((True, int, True, False))}
    assert len(step.graphs) == 1
    assert world.n == 3


def test_a_handler_that_raises_as_it_is_put_back_lets_all_others_come_back(handle, monkeypatch):
    def look(number, frame):
        raise TooSoonError

    def put(number, handler):
        before = put_back(number, handler)
        if handler is look:
            monkeypatch.undo()
            _raise(number)
        return before

    put_back, others = signal.signal, [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM]
    handle(signal.SIGUSR1, look)
    for number in others:
        handle(number, _ignore)
    with pytest.raises(TooSoonError), signals_wait(interrupts_wait=True):
        monkeypatch.setattr(signal, "signal", put)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, *others)] == [look, _ignore, _ignore, _ignore]
    with signals_wait(interrupts_wait=False):  # none is in force any more
        assert signal.getsignal(signal.SIGUSR1) is not look


def _ignore(number, frame):
    pass


@pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_signals_wait_has_the_handlers_and_none_of_the_signals(handle):
    handled = []
    handle(signal.SIGUSR1, lambda number, frame: handled.append(number))
    before = signal.getsignal(signal.SIGUSR1)

    def look():
        return signal.getsignal(signal.SIGUSR1) is before, handled

    with signals_wait(interrupts_wait=True):
        _raise(signal.SIGUSR1)
        said = in_a_child(look)
    assert said == "(True, [])"
    assert handled == [signal.SIGUSR1]


def by_key(world):
    world.table["log"] += [1]


def in_a_loop(world):
    for group in world.groups:
        group += [1]


def by_set(world):
    world.table["seen"] |= {len(world.table["seen"])}


def by_another_name(world):
    items = world.items
    items += [1]
    items = None


def where_nothing_is(world):
    world.counts["new"].append(1)


@pytest.mark.parametrize("change", [by_key, in_a_loop, by_set, by_another_name, where_nothing_is])
@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_what_a_step_does_to_containers_is_its_own_beside_an_idle_thread(change):
    ours, theirs = (
        types.SimpleNamespace(
            table={"log": [0], "seen": set()},
            groups=[[0], [0]],
            items=[0],
            counts=collections.defaultdict(list),
        )
        for _ in range(2)
    )
    done = threading.Event()
    idle = threading.Thread(target=done.wait)
    idle.start()
    try:
        step = make_step(ours, change, lambda: None)
        for _ in range(4):
            step(torch.ones(3, 4))
            change(theirs)
            assert (ours.table, ours.groups, ours.items, ours.counts) == (
                theirs.table,
                theirs.groups,
                theirs.items,
                theirs.counts,
            )
            for world in (ours, theirs):
                world.counts.clear()
    finally:
        done.set()
        idle.join()


@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_what_a_step_made_from_text_puts_into_a_dict_is_its_own_beside_an_idle_thread():
    made, done = {}, threading.Event()
    exec("log = {}\ndef put(x, key):\n    log[key] = 7\n    return x * 2\n", made)
    idle = threading.Thread(target=done.wait)
    idle.start()
    try:
        step = Step(made["put"], build=interpret)
        for _ in range(4):
            made["log"]["a"] = 0
            step(torch.ones(3, 4), "a")
            assert made["log"] == {"a": 7}
    finally:
        done.set()
        idle.join()


@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_a_number_that_another_thread_sets_again_and_again_is_read_in_each_call():
    world = types.SimpleNamespace(weight=1.0)

    def anneal():
        world.weight += 1.0

    with Meanwhile(anneal) as meanwhile:

        def read(world):
            meanwhile.pause()
            return world.weight

        step = make_step(world, read, lambda: None)
        for _ in range(3):
            step(torch.zeros(3, 4))
    assert meanwhile.outcomes
    for weight in (1000.0, 2000.0):
        world.weight = weight
        assert step(torch.zeros(3, 4)).item() == pytest.approx(weight, abs=50)  # and the loss


class Announced:
    """A lock, in place of another, that tells when somebody has to wait for it."""

    def __init__(self, lock):
        self._lock, self.is_waited_for = lock, threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_calls_of_one_step_by_two_threads_lose_no_count():
    world = types.SimpleNamespace(n=0, total=0.0)
    came, others, results = [], [], []

    def build(gm, inputs, static):
        run = interpret(gm, inputs, static)

        def executable(values):
            came.append(threading.current_thread())
            if others and others[0] in came:
                lock.is_waited_for.set()  # it does not wait
            elif others:
                others[0].start()
                assert lock.is_waited_for.wait(HANG_S)
            return run(values)

        return executable

    def step(x):
        world.n += 1
        world.total += x.sum().item()
        return x * world.n

    step = Step(step, build=build, strict=True)
    lock = step._lock.lock = Announced(step._lock.lock)
    for _ in range(3):
        step(torch.ones(2))
    others.append(threading.Thread(target=lambda: results.append(step(torch.ones(2)))))
    results.append(step(torch.ones(2)))
    others[0].join()
    assert (world.n, world.total) == (5, 10.0)
    assert sorted(result[0].item() for result in results) == [4, 5]  # the other thread may be first to note its own


class Visited:
    """A model, a count and a step whose callback has another thread call a step, and waits for it."""

    def __init__(self, capture):
        torch.manual_seed(0)
        self.model, self.n, self.said = nn.Linear(2, 2), 0, []
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.step = capture(self.train)
        self.called = self.step

    def train(self, x):
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n += 1
        ms.callback(self.visit, self.n, loss.item())
        return loss

    def visit(self, *said):
        self.said.append(said)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=self.called, args=[torch.ones(2)], daemon=True)
            thread.start()
            thread.join(HANG_S)
            assert not thread.is_alive()
            self.said.append("back")


def test_a_callback_may_wait_for_a_call_in_another_thread():
    """In the first call, which is eager, and in replays."""
    plain = Visited(lambda function: function)
    captured = Visited(lambda function: Step(function, build=interpret, strict=True))
    losses = [[world.step(torch.ones(2)).item() for _ in range(4)] for world in (plain, captured)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert captured.said[2::3] == plain.said[2::3] == ["back"] * 4
    for number in range(2):
        said, expected = captured.said[number::3], plain.said[number::3]
        assert [n for n, _ in said] == [n for n, _ in expected]
        assert [loss for _, loss in said] == pytest.approx([loss for _, loss in expected], rel=1e-4)
    assert sum(graph.num_runs for graph in captured.step.graphs) == 7


def test_steps_may_call_each_other_in_callbacks():
    first, second = (Visited(lambda function: Step(function, build=interpret, strict=True)) for _ in range(2))
    first.called, second.called = second.step, first.step
    for _ in range(3):
        first.step(torch.ones(2))
        second.step(torch.ones(2))
    assert (first.n, second.n) == (6, 6)
    assert first.step.graphs
    assert second.step.graphs


@pytest.mark.parametrize(("add", "after"), [(100, [1, 2, 3, 104, 105]), (math.nan, [1, 2, 3, 4, 5])])
def test_what_others_count_while_a_graph_runs_is_added_to(add, after):
    world = types.SimpleNamespace(n=0, seen=[])
    during = []

    def build(gm, inputs, static):
        run = interpret(gm, inputs, static)

        def executable(values):
            for change in during:
                change()
            return run(values)

        return executable

    def step(x):
        world.n += 1
        print(world.n, file=log)
        return x + world.n

    log = io.StringIO()
    step = Step(step, build=build, strict=True)
    counts = []
    for number in range(5):
        during[:] = [lambda: setattr(world, "n", world.n + add)] if number == 3 else []
        step(torch.ones(2))
        counts.append(world.n)
    assert counts == after
    assert log.getvalue().split() == [*map(str, after)]
    assert len(step.graphs) == 1


def test_what_others_count_across_a_branch_of_the_step_is_not_taken_for_its_own():
    world = types.SimpleNamespace(n=0)
    during = []

    def build(gm, inputs, static):
        run = interpret(gm, inputs, static)
        return lambda values: ([change() for change in during], run(values))[1]

    def step(x):
        world.n = world.n + 1 if world.n < 100 else 0
        return x + 1

    step = Step(step, build=build, strict=True)
    for number in range(5):
        during[:] = [lambda: setattr(world, "n", 200)] if number == 3 else []
        step(torch.ones(2))
    assert world.n == 5
