import gc
import os
import threading
import weakref

import pytest
import torch

from millstream import _native
from millstream.device import MAX_STREAMS, Event, Place, Stream, context, guard
from millstream.device.context import DeviceContext
from millstream.device.drivers import cuda
from millstream.device.drivers.cpu import CpuDriver
from millstream.device.drivers.driver import Copies
from millstream.errors import ArgumentError, DeviceError
from tests import processes
from tests.device.virtual_device import make_virtual_context


@pytest.fixture
def cpu():
    made = context("cpu")
    yield made
    made.close()


class User:
    def __init__(self, log=None):
        self.closed = 0
        self.log = log

    def close(self):
        self.closed += 1
        if self.log is not None:
            self.log.append("user")


# --- one per place


def test_one_context_per_place(cpu):
    assert context("cpu") is context(Place("cpu")) is context(torch.device("cpu")) is cpu


def test_threads_that_ask_first_at_the_same_time_get_one_context():
    context("cpu").close()
    barrier, found = threading.Barrier(8), []

    def ask():
        barrier.wait()
        found.append(context("cpu"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_an_absent_place_has_no_context(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="cuda:0"):
        context("cuda:0")


# --- streams and events


def test_streams_are_made_once_and_are_distinct():
    ctx, device = make_virtual_context()
    streams = [ctx.streams[i] for i in range(MAX_STREAMS)]
    assert len(set(streams)) == MAX_STREAMS
    assert [ctx.streams[i] for i in range(MAX_STREAMS)] == streams
    assert ctx.streams.to_device is ctx.streams.to_device
    assert ctx.streams.to_device not in streams
    assert len(device.streams) == MAX_STREAMS + 2  # and the default stream


def test_streams_stay_distinct_when_the_runtime_repeats_itself(monkeypatch):
    ctx, device = make_virtual_context()
    ring, turn = [device._add(str(i)) for i in range(3)], iter([0, 1, 0, 1, 2])
    monkeypatch.setattr(device, "make_stream", lambda high_priority: ring[next(turn)])
    assert [ctx.streams[i] for i in range(3)] == ring
    monkeypatch.setattr(device, "make_stream", lambda high_priority: ring[0])
    with pytest.raises(DeviceError, match="beyond the 3 in use"):
        ctx.streams[3]


@pytest.mark.parametrize("index", [-1, MAX_STREAMS])
def test_a_stream_that_does_not_exist(index, cpu):
    with pytest.raises(ArgumentError, match=f"Stream {index} of cpu"):
        cpu.streams[index]


def test_the_streams_and_events_of_the_cpu_have_the_interface(cpu):
    for stream in (cpu.streams[0], cpu.streams.to_device, cpu.current_stream()):
        assert isinstance(stream, Stream)
    event = cpu.events.acquire()
    assert isinstance(event, Event)
    event.record(cpu.streams[0])
    cpu.streams[1].wait_event(event)
    event.synchronize()
    cpu.streams[1].synchronize()
    assert event.query()
    assert cpu.streams[1].query()
    with cpu.on(cpu.streams[1]), cpu.driver.in_thread():
        assert cpu.current_stream() is cpu.current_stream()
    assert not cpu.is_capturing()
    cpu.synchronize()
    assert cpu.graphs.pool == (0, 0)
    cpu.events.release(event)


@pytest.mark.gpu
def test_the_streams_and_events_of_torch_have_the_interface():
    assert isinstance(torch.cuda.Stream(), Stream)
    assert isinstance(torch.cuda.Event(), Event)


def test_timing_events_of_the_cpu(cpu):
    start, end = cpu.events.acquire(timing=True), cpu.events.acquire(timing=True)
    start.record(cpu.streams[0])
    end.record(cpu.streams[0])
    assert 0 <= start.elapsed_time(end) < 1000
    plain = cpu.events.acquire()
    plain.record(cpu.streams[0])
    with pytest.raises(RuntimeError, match="timing"):
        start.elapsed_time(plain)


def test_events_are_lent_again(cpu):
    events = [cpu.events.acquire(timing=timing) for timing in (False, True, False)]
    for event in events:
        cpu.events.release(event)
    again = [cpu.events.acquire(timing=timing) for timing in (True, False, False)]
    assert set(map(id, again)) == set(map(id, events))
    assert again[0].timing
    assert not again[1].timing
    assert id(cpu.events.acquire()) not in set(map(id, events))


def test_an_event_cannot_be_released_twice(cpu):
    event = cpu.events.acquire()
    cpu.events.release(event)
    with pytest.raises(DeviceError, match="released before"):
        cpu.events.release(event)


# --- memory


def test_pinned_blocks_are_lent_and_come_back(cpu):
    block = cpu.pinned(1000)
    assert (block.dtype, block.numel(), block.device.type) == (torch.uint8, 1000, "cpu")
    held = cpu.pinned_bytes
    cpu.release_pinned(block)
    again = cpu.pinned(1000)
    assert again.data_ptr() == block.data_ptr()
    assert cpu.pinned_bytes == held


def test_a_pinned_block_waits_for_its_event_and_gives_it_back():
    ctx, device = make_virtual_context("lazy")
    block, event = ctx.pinned(1000), ctx.events.acquire()
    gate = ctx.events.acquire()
    ctx.driver.copy(Copies([(device.allocate(1000), block)], ctx.streams.to_device))
    event.record(ctx.streams.to_device)
    ctx.release_pinned(block, after=event)
    assert ctx.pinned(1 << 20).numel() == 1 << 20  # waits: there is room once the copy is over
    assert event.query()
    assert ctx.events.acquire() is event
    ctx.events.release(gate)
    assert device.num_pins == 1


def test_the_graph_pool_is_made_once():
    ctx, device = make_virtual_context()
    assert ctx.graphs.pool == (0, 1)
    device.make_graph_pool = None
    assert ctx.graphs.pool == (0, 1)


def test_the_capture_lock_is_one_for_all_places_and_reentrant(cpu):
    other, _ = make_virtual_context()
    assert cpu.capture_lock is other.capture_lock
    with cpu.capture_lock, other.capture_lock:
        cpu.pinned(10)
        taken = []
        thread = threading.Thread(target=lambda: taken.append(cpu.capture_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert taken == [False]


def test_pinning_waits_for_the_capture_lock(cpu):
    done = threading.Event()

    def ask():
        cpu.pinned(10)
        done.set()

    thread = threading.Thread(target=ask)
    with cpu.capture_lock:
        thread.start()
        assert not done.wait(0.05)
    thread.join()
    assert done.is_set()


# --- the end


def test_close_ends_users_then_waits_for_the_device_then_drops_everything():
    log = []

    class Logged(CpuDriver):
        def synchronize(self):
            log.append(("waits", ctx.pinned_bytes > 0, list(ctx.streams._numbered)))

    ctx = DeviceContext(Place("cpu"), Logged())
    user = User(log)
    ctx.attach(user)
    stream, block = ctx.streams[0], ctx.pinned(10)
    ctx.close()
    ctx.close()
    assert log == ["user", ("waits", True, [0])]
    assert user.closed == 1
    assert (ctx.closed, ctx.pinned_bytes, ctx.streams._numbered) == (True, 0, {})
    assert stream.query()  # what was lent stays usable in the borrower's hands
    assert block.numel() == 10


USES = {
    "stream": lambda c: c.streams[0],
    "stream for copies": lambda c: c.streams.to_device,
    "current_stream": lambda c: c.current_stream(),
    "on": lambda c: c.on(None),
    "in_thread": lambda c: c.driver.in_thread(),
    "spare_captures": lambda c: c.driver.spare_captures(),
    "event": lambda c: c.events.acquire(),
    "pinned": lambda c: c.pinned(1),
    "graph_pool": lambda c: c.graphs.pool,
    "allocate": lambda c: c.driver.allocate(1),
    "copy": lambda c: c.driver.copy(Copies([], None)),
    "synchronize": lambda c: c.synchronize(),
    "is_capturing": lambda c: c.is_capturing(),
    "attach": lambda c: c.attach(User()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_context_is_of_no_use(use):
    ctx = context("cpu")
    ctx.close()
    with pytest.raises(DeviceError, match="cpu has been closed"):
        use(ctx)


def test_what_a_closed_context_lent_can_still_be_given_back():
    ctx = context("cpu")
    event, block = ctx.events.acquire(), ctx.pinned(10)
    ctx.close()
    ctx.events.release(event)
    ctx.release_pinned(block)


def test_after_close_there_is_a_new_context():
    old = context("cpu")
    old.close()
    new = context("cpu")
    assert new is not old
    assert not new.closed
    old.close()
    assert context("cpu") is new


def test_close_drops_everything_even_when_the_device_fails(monkeypatch):
    ctx = context("cpu")
    ctx.streams[0]
    ctx.pinned(10)

    def fail():
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(ctx._driver, "synchronize", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        ctx.close()
    assert ctx.pinned_bytes == 0
    assert ctx.closed


def test_a_context_does_not_keep_its_users_alive(cpu):
    user = User()
    gone = weakref.ref(user)
    cpu.attach(user)
    del user
    gc.collect()
    assert gone() is None


def run_python(program):
    done = processes.run_python(program, ("-W", "error::ResourceWarning"))
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_the_interpreter_closes_contexts_at_its_end():
    out = run_python("""
        from millstream.device import context
        class User:
            def close(self): print("closed before", not ctx.closed)
        user, ctx = User(), context("cpu")
        ctx.attach(user)
        print("end of program")
    """)
    assert out.split("\n")[:2] == ["end of program", "closed before True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_sees_no_context_and_no_held_lock():
    out = run_python("""
        import os, threading
        from millstream.device import context
        from millstream.errors import DeviceError
        old = context("cpu")
        held, go = threading.Event(), threading.Event()
        def hold():
            with old.capture_lock:
                held.set(); go.wait()
        thread = threading.Thread(target=hold); thread.start(); held.wait()
        import warnings; warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            try:
                old.streams[0]
            except DeviceError as error:
                ok = "forked" in str(error)
            old.close()
            new = context("cpu")
            with new.capture_lock:
                ok = ok and new is not old and new.streams[0] is not None
            os._exit(7 if ok else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), old.closed)
        go.set(); thread.join()
    """)
    assert out == "7 False\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_collect_its_parents_garbage():
    """CUDA objects that die in the child abort it."""
    out = run_python("""
        import gc, os
        import millstream
        class Graph:
            def __del__(self):
                os._exit(1)
        graph = Graph()
        graph.itself = graph
        gc.disable()
        del graph
        import warnings; warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os._exit(0)
    """)
    assert out == "7\n"


# --- the guard


def test_the_guard_does_nothing_on_the_cpu():
    with guard("cpu") as place:
        assert place == Place("cpu")


def test_the_guard_of_an_absent_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="cuda:3"), guard("cuda:3"):
        pytest.fail("entered")


# --- lending


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("device", ["cpu", "virtual", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_lent_tensor_tells_when_its_last_view_is_gone(device, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(_native, "load", lambda name: None)
    ctx = make_virtual_context()[0] if device == "virtual" else context(device)

    class Token:
        pass

    token, memory = Token(), ctx.driver.allocate(512)[256:]
    gone = weakref.ref(token)
    lent = ctx.driver.lend(memory, token)
    del token
    assert lent.data_ptr() == memory.data_ptr()
    assert (lent.numel(), lent.dtype, lent.device) == (256, torch.uint8, memory.device)
    view = lent.view(torch.float32).as_strided((3,), (1,), 8).data
    kept = view.untyped_storage()
    del lent, memory
    assert gone() is not None
    del view
    assert gone() is not None
    del kept
    assert gone() is None
    ctx.close()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "arrays"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("device", ["cpu", "virtual", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_is_lent_has_the_form_of_its_memory(device, dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(_native, "load", lambda name: None)
    ctx = make_virtual_context()[0] if device == "virtual" else context(device)
    memory = ctx.driver.allocate(1024).fill_(1).view(dtype)[3:].as_strided((4, 2, 3), (6, 1, 2), 7)
    lent = ctx.driver.lend(memory, object())
    assert (lent.data_ptr(), lent.dtype, lent.device) == (memory.data_ptr(), memory.dtype, memory.device)
    assert (lent.size(), lent.stride()) == (memory.size(), memory.stride())
    assert not lent._is_view()
    assert lent.untyped_storage()._cdata != memory.untyped_storage()._cdata
    ctx.close()


def test_a_lent_tensor_keeps_its_memory():
    ctx, _ = make_virtual_context()
    memory = ctx.driver.allocate(256)
    lent = ctx.driver.lend(memory, object())
    address = memory.data_ptr()
    del memory
    assert ctx.driver.allocate(256).data_ptr() != address
    del lent
    assert ctx.driver.allocate(256).data_ptr() == address


def test_a_thread_is_kept_near_the_device_for_a_while():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with cuda._run_on(one):
        assert os.sched_getaffinity(0) == one
    with cuda._run_on({10_000}):  # not ours to use
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_the_runtime_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(cuda.ctypes, "CDLL", asked.append)
    cuda._find.cache_clear()
    for _ in range(3):
        with cuda._SpareCaptures():
            pass
    cuda._find.cache_clear()
    assert len(asked) == 1
