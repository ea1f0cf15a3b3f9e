"""The compiled code: every byte copied, once, by however many threads, and calls in the right order."""

import ctypes
import gc
import multiprocessing
import random
import shutil
import threading
import weakref
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import _native
from millstream.device import copying
from millstream.device.drivers import cuda
from tests.clocks import HANG_S

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

CHUNK = 64 << 10
EDGE = 7  # bytes around a piece that must stay as they are


@pytest.fixture(scope="module")
def team():
    """More threads than this machine may have processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "num_processors", lambda: 6)
        return copying.Filler(_native.load("core"))


def begin(filler, to, sources, num_bytes, num_threads, owner, *, past_caches=False):
    start = filler.prepare(to, num_bytes, num_threads, past_caches=past_caches)
    return filler.follow(start(sources.buffer_info()[0], owner))


def fill(filler, sizes, num_threads, seed=0):
    """Whether all pieces arrive, and nothing else is touched."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 255, size, dtype=np.uint8) for size in sizes]
    targets = [np.full(size + 2 * EDGE, 255, dtype=np.uint8) for size in sizes]
    addresses = [[each.ctypes.data + EDGE for each in targets], [each.ctypes.data for each in sources], sizes]
    filling = begin(
        filler, *(array("Q", each) for each in addresses), num_threads, owner=None, past_caches=seed % 2 == 1
    )
    if seed % 3 == 1:
        threading.Event().wait(1e-4)  # the helpers may do it all
    if seed % 3 == 2:
        del filling
    else:
        filling.finish()
    return all(
        np.array_equal(target[EDGE:-EDGE], source) and (target[:EDGE] == 255).all() and (target[-EDGE:] == 255).all()
        for target, source in zip(targets, sources, strict=True)
    )


SIZES = st.lists(
    st.one_of(st.integers(0, 300), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, num_threads=st.integers(1, 6), seed=st.integers(0, 9))
def test_every_piece_arrives(team, sizes, num_threads, seed):
    assert fill(team, sizes, num_threads, seed)


def test_thousands_of_calls_close_to_each_other_and_far_apart(team):
    rng = random.Random(0)
    for i in range(2000):
        sizes = [rng.choice([1, 1000, CHUNK, 3 * CHUNK + 1]) for _ in range(rng.randint(1, 4))]
        assert fill(team, sizes, 6, i), i
        if rng.random() < 0.01:
            threading.Event().wait(0.002)  # the helpers go to sleep


def test_large_memory_wakes_sleeping_threads(team):
    for seed in range(3):
        threading.Event().wait(0.01)
        assert fill(team, [20 << 20, 3], 6, seed)


def test_what_is_being_copied_stays_alive_until_it_is(team):
    memory = np.zeros(4 * CHUNK, dtype=np.uint8)
    noted = weakref.ref(memory)
    addresses = [array("Q", [each]) for each in (memory.ctypes.data, memory.ctypes.data, memory.nbytes)]
    filling = begin(team, *addresses, 6, owner=memory)
    del memory
    assert noted() is not None
    filling.finish()
    assert noted() is None
    filling.finish()  # once is enough


def test_what_is_short_is_copied_at_once(team):
    source, to = np.full(CHUNK, 7, dtype=np.uint8), np.zeros(CHUNK, dtype=np.uint8)
    filling = begin(team, *(array("Q", [each]) for each in (to.ctypes.data, source.ctypes.data, CHUNK)), 6, source)
    assert (to == 7).all()
    filling.finish()


def test_what_is_dropped_unfinished_is_copied_and_then_let_go(team):
    """As an interrupt after the compiled code, or in a finalizer, would have it."""
    source = np.full(40 * CHUNK, 7, dtype=np.uint8)
    to = np.zeros_like(source)
    memory = [to, source]
    noted = weakref.ref(source)
    filling = begin(team, *(array("Q", [each]) for each in (to.ctypes.data, source.ctypes.data, to.nbytes)), 6, memory)
    del memory, source
    filling._capsule = None
    assert (to == 7).all()
    assert noted() is None


def test_several_fillings_by_one_caller(team):
    sources = [np.full(20 * CHUNK, i, dtype=np.uint8) for i in range(3)]
    targets = [np.zeros_like(source) for source in sources]
    fillings = [
        begin(team, *(array("Q", [each]) for each in (to.ctypes.data, source.ctypes.data, source.nbytes)), 6, None)
        for to, source in zip(targets, sources, strict=True)
    ]
    for filling in fillings:
        filling.finish()
    assert all(np.array_equal(to, source) for to, source in zip(targets, sources, strict=True))


def test_several_callers_at_once(team):
    right = []

    def call(seed):
        right.extend(fill(team, [3 * CHUNK + seed, 10], 6, seed) for _ in range(100))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 400


def fill_in_child(filler, results):
    results.put(fill(filler, [5 * CHUNK], 6))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking a process with threads: that is the point
def test_a_forked_child_copies_without_the_threads_of_its_parent(team):
    assert fill(team, [5 * CHUNK], 6)
    forked = multiprocessing.get_context("fork")
    results = forked.SimpleQueue()
    child = forked.Process(target=fill_in_child, args=(team, results))
    child.start()
    child.join(HANG_S)
    assert child.exitcode == 0
    assert results.get()


class FakeDriver:
    """Writes down what it is asked for; from a given call on it refuses."""

    def __init__(self, fails_at=None):
        self.calls = []
        pointer = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
        self.copy = kind(lambda to, source, size, stream: self.note("copy", to, source, size, stream))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)
        self.record = kind(lambda event, stream: self.note("record", event, stream))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_uint)
        self.wait = kind(lambda stream, event, flags: self.note("wait", event, stream))
        self.fails_at = fails_at

    def note(self, *call):
        self.calls.append(call)
        return 700 if len(self.calls) == self.fails_at else 0

    def enqueuer(self):
        return copying.Enqueuer(_native.load("core"), self.copy, self.record, self.wait)


def test_copies_are_enqueued_between_the_records_and_behind_the_waits():
    fake = FakeDriver()
    copies = [(1 << 47, 11, 5), (2000, 21, 6)]
    assert fake.enqueuer().order(77, [8, 9], [1], copies, [2, 3])() == 0
    assert fake.calls == [
        ("wait", 8, 77),
        ("wait", 9, 77),
        ("record", 1, 77),
        ("copy", 1 << 47, 11, 5, 77),
        ("copy", 2000, 21, 6, 77),
        ("record", 2, 77),
        ("record", 3, 77),
    ]


def test_a_driver_gives_all_of_a_transfer_to_compiled_code(monkeypatch):
    fake, to, source = FakeDriver(), torch.zeros(6, dtype=torch.uint8), torch.ones(6, dtype=torch.uint8)
    monkeypatch.setattr(cuda, "enqueuer", fake.enqueuer)
    made = object.__new__(cuda.CudaDriver)  # without asking for a device
    waits, before, after = ([SimpleNamespace(cuda_event=number)] for number in (8, 1, 2))
    made.copy(cuda.Copies([(to, source)], SimpleNamespace(cuda_stream=77), waits, before, after))
    copied = ("copy", to.data_ptr(), source.data_ptr(), 6, 77)
    assert fake.calls == [("wait", 8, 77), ("record", 1, 77), copied, ("record", 2, 77)]


def test_where_compiled_code_meets_an_error_pytorch_does_all_of_a_transfer(monkeypatch):
    fake, to, calls = FakeDriver(fails_at=1), torch.zeros(6), []
    monkeypatch.setattr(cuda, "enqueuer", fake.enqueuer)
    made = object.__new__(cuda.CudaDriver)
    monkeypatch.setattr(made, "on", lambda stream: nullcontext(), raising=False)

    def event(number):
        return SimpleNamespace(
            cuda_event=number,
            wait=lambda stream: calls.append(("wait", number)),
            record=lambda stream: calls.append(("record", number)),
        )

    stream = SimpleNamespace(cuda_stream=77)
    made.copy(cuda.Copies([(to, torch.ones(6))], stream, [event(8)], [event(1)], [event(2)]))
    assert calls == [("wait", 8), ("record", 1), ("record", 2)]
    assert bool((to == 1).all())


def test_without_copies_there_are_records_only():
    fake = FakeDriver()
    assert fake.enqueuer().order(77, [], [], [], [2])() == 0
    assert fake.calls == [("record", 2, 77)]


def test_nothing_follows_an_error():
    fake = FakeDriver(fails_at=2)
    assert fake.enqueuer().order(77, [], [1], [(10, 11, 5), (20, 21, 6)], [2])() == 700
    assert len(fake.calls) == 2


def test_an_order_can_be_given_again():
    fake = FakeDriver(fails_at=6)
    give = fake.enqueuer().order(77, [], [], [(10, 11, 5)], [2])
    gc.collect()  # nobody but it knows what is ordered
    assert [give(), give(), give()] == [0, 0, 700]
    assert fake.calls == [("copy", 10, 11, 5, 77), ("record", 2, 77)] * 3


def test_a_function_is_given_the_pointer_each_time():
    number = ctypes.c_int(1)
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def exchange(pointer):
        seen.append(pointer[0])
        pointer[0] += 1
        return 30 + pointer[0]

    call = copying.with_pointer(exchange, number)
    assert [call(), call()] == [32, 33]
    assert seen == [1, 2]
    assert copying.with_pointer(exchange, number)() == 34


def test_what_is_no_address_is_an_error():
    with pytest.raises(TypeError):
        _native.load("core").enqueue("here", 0)


def test_prepared_copies_go_where_they_are_told_each_time():
    fake = FakeDriver()
    copies = fake.enqueuer().prepare([5, 6])
    for base in (0, 1 << 47):
        copies.to[:], copies.sources[:] = array("Q", [base + 10, base + 20]), array("Q", [base + 11, base + 21])
        assert copies.enqueue(77) == 0
    assert fake.calls == [
        ("copy", base + to, base + to + 1, size, 77) for base in (0, 1 << 47) for to, size in ((10, 5), (20, 6))
    ]
    assert FakeDriver(fails_at=1).enqueuer().prepare([5]).enqueue(77) == 700


@pytest.mark.parametrize(("text", "number"), [("max 100000", 8), ("250000 100000", 2), ("1000 100000", 1), ("?", 8)])
def test_no_more_threads_than_the_container_is_granted(monkeypatch, text, number):
    monkeypatch.setattr(copying.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(copying.Path, "read_text", lambda _: text)
    assert copying.num_processors() == number


def test_without_compiled_code_there_is_none(monkeypatch):
    monkeypatch.setattr(_native, "load", lambda name: None)
    assert copying.filler.__wrapped__() is None
    assert copying.enqueuer.__wrapped__() is None
