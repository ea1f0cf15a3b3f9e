# ruff: noqa: E501, PTH109, PTH123, PTH204, PTH208, SIM115
"""Clocks, files and the system's randomness: noticed while a step is traced, and refused with the line."""

import _thread
import asyncio
import bz2
import concurrent.futures
import configparser
import datetime
import decimal
import functools
import gc
import hashlib
import hmac
import io
import logging
import multiprocessing.pool
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
import weakref
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from time import perf_counter

import pytest
import torch

from millstream import callback
from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret

SYSTEM = random.SystemRandom()
OPENED = []
READS = {
    "a clock": {
        "time.time": lambda x: x * time.time(),
        "a name of its own": lambda x: x * perf_counter(),
        "datetime.now": lambda x: x * datetime.datetime.now().microsecond,
        "date.today": lambda x: x * datetime.date.today().toordinal(),
        "a branch": lambda x: x * 2 if time.monotonic_ns() % 2 else x * 3,
    },
    "a file": {
        "open": lambda x: x * len(open(__file__).read()),
        "Path.read_text": lambda x: x * len(Path(__file__).read_text()),
        "an open file": lambda x: x * (1 + len(OPENED[0].read(1))),
        "os.listdir": lambda x: x * len(os.listdir()),
        "os.path.getmtime": lambda x: x * os.path.getmtime(__file__),
    },
    "the system's randomness": {
        "os.urandom": lambda x: x * os.urandom(1)[0],
        "secrets": lambda x: x * secrets.randbelow(100),
        "uuid": lambda x: x * (uuid.uuid4().int % 100),
        "SystemRandom": lambda x: x * SYSTEM.random(),
    },
    "which environment variables there are": {
        "len(os.environ)": lambda x: x * len(os.environ),
        "items of os.environ": lambda x: x * len(dict(os.environ)),
    },
    "torch.initial_seed()": {"seed": lambda x: x * torch.initial_seed()},
    "which subclasses a class has": {
        "__subclasses__": lambda x: x * len(torch.nn.Module.__subclasses__()),
        "type.__subclasses__": lambda x: x * len(type.__subclasses__(torch.nn.Module)),
    },
    "os.getcwd()": {"directory": lambda x: x * len(os.getcwd())},
    "gc.isenabled()": {"collector": lambda x: x * gc.isenabled()},
    "sys.getrefcount()": {"references": lambda x: x * sys.getrefcount(x)},
    "weakref.getweakrefcount()": {"weak references": lambda x: x * weakref.getweakrefcount(x)},
    "decimal.getcontext()": {"precision of decimals": lambda x: x * decimal.getcontext().prec},
    "signal.getsignal()": {"handler": lambda x: x * (signal.getsignal(signal.SIGUSR1) is None)},
    "threading.active_count()": {"active threads": lambda x: x * threading.active_count()},
}
CASES = [(what, name) for what, reads in READS.items() for name in reads]


@pytest.fixture(autouse=True)
def _opened():
    with Path(__file__).open() as file:
        OPENED[:] = [file]
        yield


@pytest.mark.parametrize(("what", "name"), CASES, ids=[name for _, name in CASES])
def test_it_is_refused_with_the_line(what, name):
    function = READS[what][name]
    message = re.escape(f"The step reads {what}, which gives something else each time")
    with pytest.raises(CaptureError, match=message) as caught:
        Step(function, build=interpret, strict=True)(torch.ones(1))
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)


def start_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def start_timer(act):
    timer = threading.Timer(0, act)
    timer.start()
    timer.join()


def start_by_hand(act):
    _thread.start_new_thread(act, ())


def submit(act):
    POOL.submit(act).result()


def map_in_threads(act):
    with multiprocessing.pool.ThreadPool(1) as pool:
        pool.apply(act)


def fork(_):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def fork_a_process(_):
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


def run_a_program(_):
    subprocess.run(["true"], check=True)


STARTS = {
    "a thread": (start_thread, start_timer, start_by_hand),
    "work elsewhere": (submit, map_in_threads),
    "a process": (fork, fork_a_process, run_a_program),
}
POOL = concurrent.futures.ThreadPoolExecutor(1)


@pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("what", "start"), [(what, start) for what, starts in STARTS.items() for start in starts])
def test_what_a_step_starts_is_refused_as_it_would_not_be_started_again(what, start):
    started = []

    def step(x):
        start(lambda: started.append(1))
        return x + 1

    POOL.submit(int).result()  # it has its thread
    with pytest.raises(CaptureError, match=f"The step starts (a thread|{what}), which a graph would not do again"):
        Step(step, build=interpret, strict=True)(torch.ones(1))
    assert not started


def test_what_a_callback_starts_is_started_in_each_call():
    started = []

    def step(x):
        callback(start_thread, lambda: started.append(1))
        return x + 1

    step = Step(step, build=interpret, strict=True)
    for _ in range(3):
        step(torch.ones(1))
    assert started == [1, 1, 1]
    assert step.graphs


def test_an_error_that_the_step_catches_counts():
    def step(x):
        try:
            return x * time.time()
        except CaptureError:
            return x

    with pytest.raises(CaptureError, match="reads a clock"):
        Step(step, build=interpret, strict=True)(torch.ones(1))


def test_the_remedy_works():
    step = Step(lambda x, now: x * now, build=interpret, strict=True)
    times, x = [torch.tensor(time.time(), dtype=torch.float64) for _ in range(4)], torch.ones(1, dtype=torch.float64)
    assert [step(x, now).item() for now in times] == [now.item() for now in times]
    assert len(step.graphs) == 1


def test_it_runs_eagerly_otherwise():
    step = Step(lambda x: (x + 1, datetime.datetime.now()), build=interpret)
    with pytest.warns(FallbackWarning, match="reads a clock"):
        first = step(torch.ones(1))
    assert step(torch.ones(1))[1] > first[1]


def test_clocks_of_the_library_for_output_and_waiting_do_not_matter(caplog):
    lock = threading.Condition()

    def step(x):
        with lock:
            lock.wait(0.001)
        logging.getLogger("millstream.test").debug("a record has the time")
        return x * 2

    captured = Step(step, build=interpret, strict=True)
    for _ in range(3):
        assert captured(torch.ones(1)).item() == 2
    assert captured.graphs


class Key:
    pass


KEY = Key()
OPAQUE = {  # what no Python can see into: made, called, and what shows that it was
    "hash": (hashlib.sha256, lambda o: o.update(b"x"), lambda o: o.hexdigest()),
    "hmac": (lambda: hmac.new(b"k", digestmod="md5"), lambda o: o.update(b"x"), lambda o: o.hexdigest()),
    "zlib": (zlib.compressobj, lambda o: o.compress(b"x"), lambda o: o.copy().flush()),
    "bz2": (bz2.BZ2Compressor, lambda o: o.compress(b"x"), lambda o: o.flush()),
    "lock": (threading.Lock, lambda o: o.release() if o.locked() else o.acquire(), lambda o: o.locked()),
    "semaphore of processes": (lambda: multiprocessing.Semaphore(9), lambda o: o.acquire(), lambda o: o.get_value()),
    "generator": (torch.Generator, lambda o: o.manual_seed(o.initial_seed() + 1), lambda o: o.initial_seed()),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_methods_of_what_nobody_can_see_into_are_refused(kind):
    make, change, show = OPAQUE[kind]
    ours, theirs = make(), make()

    def step(x):
        change(ours)
        return x * 2

    with pytest.raises(CaptureError, match="nobody can compare what that") as caught:
        Step(step, build=interpret, strict=True)(torch.ones(1))
    assert f"{__file__}:{change.__code__.co_firstlineno}" in str(caught.value)
    assert show(ours) == show(make())
    ours = make()  # which the first look has not ended
    captured = Step(step, build=interpret)
    with pytest.warns(FallbackWarning):
        captured(torch.ones(1))
    for _ in range(3):
        captured(torch.ones(1))
    for _ in range(4):
        change(theirs)
    assert show(ours) == show(theirs)


def test_a_hash_that_the_step_makes_is_captured():
    def step(x):
        digest = hashlib.md5(b"x")
        digest.update(b"y")
        return x * len(digest.hexdigest())

    captured = Step(step, build=interpret, strict=True)
    assert [captured(torch.ones(1)).item() for _ in range(3)] == [32, 32, 32]
    assert len(captured.graphs) == 1


def configuration():
    parser = configparser.ConfigParser()
    parser["a"] = {"b": "2"}
    return parser


def answers(make):
    """A function behind a cache that has one answer."""

    @functools.lru_cache
    def ask(key):
        return make(key)

    ask(0)
    return ask


class Counter:
    num_asked = 0

    def ask(self, key):
        self.num_asked += 1
        return self.num_asked


def forget(ask):
    ask.cache_clear()
    ask(1)


def toggle(lock):
    lock.release() if lock.locked() else lock.acquire()


def child():
    logger = logging.Logger("child")
    logger.parent = logging.Logger("parent", logging.WARNING)
    return logger


def tree():
    return ET.fromstring("<a k='1'><b/></a>")


LIBRARY = {  # objects of Python's library: made, read, changed
    "event": (threading.Event, lambda o: 2 if o.is_set() else 3, lambda o: o.set()),
    "semaphore": (lambda: threading.Semaphore(10), lambda o: o._value, lambda o: o.acquire()),
    "queue": (asyncio.Queue, lambda o: 1 + o.qsize(), lambda o: o.put_nowait(1)),
    "weak keys": (weakref.WeakKeyDictionary, lambda o: 1 + len(o), lambda o: o.__setitem__(KEY, len(o) + 1)),
    "settings": (configuration, lambda o: float(o["a"]["b"]), lambda o: o["a"].__setitem__("b", o["a"]["b"] + "1")),
    "lock": (threading.Lock, lambda o: 2 if o.locked() else 3, toggle),
    "lock, tried": (threading.Lock, lambda o: 2 if o.acquire(False) and not o.release() else 3, toggle),
    "lock of its thread": (threading.RLock, lambda o: 2 if o._is_owned() else 3, lambda o: o.acquire()),
    "lock of tasks": (asyncio.Lock, lambda o: 2 if o.locked() else 3, lambda o: setattr(o, "_locked", True)),
    "logger": (lambda: logging.Logger("a"), lambda o: 1 + o.level, lambda o: o.setLevel(o.level + 10)),
    "logger, asked": (lambda: logging.Logger("a", 10), lambda o: 2 if o.isEnabledFor(10) else 3, lambda o: o.setLevel(20)),
    "logger, switched off": (lambda: logging.Logger("a"), lambda o: 2 if o.disabled else 3, lambda o: setattr(o, "disabled", 1)),
    "logger's parent": (child, lambda o: o.getEffectiveLevel(), lambda o: o.parent.setLevel(o.parent.level + 10)),
    "logger's handlers": (
        lambda: logging.Logger("a"), lambda o: 1 + len(o.handlers), lambda o: o.addHandler(logging.NullHandler())
    ),
    "handler": (logging.NullHandler, lambda o: 1 + o.level, lambda o: o.setLevel(o.level + 10)),
    "adapter": (
        lambda: logging.LoggerAdapter(logging.Logger("a", 10), {"n": 1}),
        lambda o: (2 if o.isEnabledFor(10) else 3) + o.extra["n"], lambda o: o.extra.update(n=o.extra["n"] + 1),
    ),
    "element, length": (tree, lambda o: 1 + len(o), lambda o: ET.SubElement(o, "c")),
    "element, attribute": (tree, lambda o: int(o.attrib["k"]) + int(o.get("k")), lambda o: o.set("k", o.get("k") + "1")),
    "element, text": (tree, lambda o: 1 + len(o[0].text or ""), lambda o: setattr(o[0], "text", (o[0].text or "") + "x")),
    "element, tag": (tree, lambda o: len(o.find("./").tag), lambda o: setattr(o[0], "tag", o[0].tag + "x")),
    "tree": (lambda: ET.ElementTree(tree()), lambda o: len(o.getroot()), lambda o: ET.SubElement(o.getroot(), "c")),
    "cache, a list": (lambda: answers(lambda key: [1]), lambda o: o(0)[0], lambda o: o(0).__setitem__(0, o(0)[0] + 1)),
    "cache, a tensor": (
        lambda: answers(lambda key: torch.ones(1)), lambda o: o(0), lambda o: forget(o) or o(0).fill_(o(0).item() + 1)
    ),
    "cache, cleared": (lambda: answers(Counter().ask), lambda o: o(0), forget),
    "cache, empty": (lambda: functools.lru_cache(Counter().ask), lambda o: o(0) + o(1), lambda o: o.cache_clear()),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIBRARY)
@pytest.mark.parametrize("where", ["between", "within", "beside a thread"])
def test_objects_of_the_library_are_read_and_changed_as_in_eager(kind, where):
    """Beside another thread, what the step does within is still the step's own."""
    make, read, change = LIBRARY[kind]

    def run(wrap):
        held = make()

        def step(x):
            if where != "between":
                change(held)
            return x * read(held)

        call, results = wrap(step), []
        for number in range(5):
            results.append(call(torch.ones(1)).item())
            if where == "between" and number == 2:
                change(held)
        return results, float(read(held))

    other, is_over = None, threading.Event()
    if where == "beside a thread":
        other = threading.Thread(target=is_over.wait)
        other.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert run(lambda step: Step(step, build=interpret)) == run(lambda step: step)
    finally:
        is_over.set()
        if other is not None:
            other.join()


def test_where_a_file_in_memory_stands_is_not_lost():
    buffer = io.StringIO("abc")

    def step(x):
        buffer.seek(buffer.tell() + 1)
        return x * 2

    with pytest.raises(CaptureError, match=r"The step writes to io\.StringIO"):
        Step(step, build=interpret, strict=True)(torch.ones(1))
    assert buffer.tell() == 0
