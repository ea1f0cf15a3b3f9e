import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millstream.device import MAX_STREAMS, Event, Place, Stream, context, guard
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.drivers.cuda import capture_nothing
from millstream.device.drivers.driver import Copies
from millstream.errors import DeviceError
from tests.clocks import HANG_S
from tests.processes import output_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu():
    made = context("cuda:0")
    yield made
    made.close()


def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_places():
    assert Place.of("cuda") == Place("cuda", torch.cuda.current_device())
    with pytest.raises(DeviceError, match=r"cuda:63.*Available here: cpu, cuda:0"):
        Place.of("cuda:63")


def test_importing_and_naming_places_does_not_initialise_cuda():
    out = output_of("""
        import torch
        import millstream.device, millstream.data
        millstream.device.Place.of("cuda:0"), millstream.device.available_places()
        print(torch.cuda.is_initialized())
    """)
    assert out == "False\n"


def test_streams_are_distinct_and_for_life(gpu):
    others = [torch.cuda.Stream() for _ in range(5)]  # the user draws from the same streams of PyTorch
    streams = [gpu.streams[i] for i in range(MAX_STREAMS)]
    assert len({stream.cuda_stream for stream in streams}) == MAX_STREAMS
    assert [gpu.streams[i] for i in range(MAX_STREAMS)] == streams
    everyone = {stream.cuda_stream for stream in (*streams, *others, torch.cuda.default_stream())}
    assert gpu.streams.to_device.cuda_stream not in everyone
    assert isinstance(gpu.streams[0], Stream)


def test_work_on_streams_is_ordered_by_events(gpu):
    x = torch.zeros(1 << 20, device="cuda:0")
    event = gpu.events.acquire()
    assert isinstance(event, Event)
    event.record(gpu.current_stream())
    gpu.streams[0].wait_event(event)
    with gpu.on(gpu.streams[0]):
        assert torch.cuda.current_stream() == gpu.streams[0]
        torch.cuda._sleep(20_000_000)
        x.fill_(3)
        event.record(gpu.streams[0])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not event.query()
    gpu.current_stream().wait_event(event)
    gpu.events.release(event)
    assert bool((x == 3).all())


def test_timing_events(gpu):
    start, end = gpu.events.acquire(timing=True), gpu.events.acquire(timing=True)
    start.record(gpu.current_stream())
    torch.cuda._sleep(1_000_000)
    end.record(gpu.current_stream())
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 1000


def test_pinned_memory_is_pinned_reused_and_protected_by_its_event(gpu):
    block = gpu.pinned(1_000_000)
    assert block.is_pinned()
    assert block.data_ptr() % 256 == 0
    block.fill_(7)
    target = torch.zeros(1_000_000, dtype=torch.uint8, device="cuda:0")
    event = gpu.events.acquire()
    ready = gpu.events.acquire()
    torch.cuda._sleep(50_000_000)
    ready.record(gpu.current_stream())
    gpu.streams.to_device.wait_event(ready)
    gpu.driver.copy(Copies([(target, block)], gpu.streams.to_device))
    event.record(gpu.streams.to_device)
    gpu.release_pinned(block, after=event)
    again = gpu.pinned(1_000_000)  # the one chunk is in use: waits for the copy, or cuts another part
    again.fill_(9)
    gpu.current_stream().wait_event(event)
    assert bool((target == 7).all())
    assert gpu.pinned_bytes <= 2 << 20


def test_graphs_share_the_pool(gpu):
    x = torch.ones(1000, device="cuda:0")
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with gpu.capture_lock, torch.cuda.graph(graph, pool=gpu.graphs.pool):
            outputs.append(x * 2 + 1)
    for graph, output in zip(graphs, outputs, strict=True):
        graph.replay()
        assert bool((output == 3).all())
    assert graphs[0].pool() == gpu.graphs.pool == graphs[1].pool()


def test_a_capture_leaves_a_replay_that_is_under_way_its_random_numbers(gpu):
    def capture_numbers():
        graph = torch.cuda.CUDAGraph()
        with gpu.graphs.lock, capture(gpu, graph):
            torch.cuda._sleep(20_000_000)  # ten milliseconds in which a replay has begun and not drawn yet
            return graph, torch.rand(1000, device="cuda:0")

    graph, numbers = capture_numbers()

    def draw(meanwhile):
        torch.manual_seed(0)
        drawn = []
        for _ in range(3):
            torch.cuda.synchronize()  # it shall begin at once
            graph.replay()
            drawn.append(numbers.clone())
            meanwhile()
        return drawn

    for alone, beside in zip(draw(lambda: None), draw(capture_numbers), strict=True):
        assert torch.equal(alone, beside)


def test_after_a_failed_capture_random_numbers_are_drawn_at_once(gpu):
    x = torch.ones(4, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with gpu.graphs.lock:
        with pytest.raises(RuntimeError), capture(gpu, graph):
            x.sum().item()
        drawn = [torch.rand(1000, device="cuda:0") for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with capture(gpu, graph):
            drawn.append(torch.rand(1000, device="cuda:0"))
        for _ in range(2):
            graph.replay()
            drawn.append(drawn[2].clone())
    assert len({each.sum().item() for each in (*drawn[:2], *drawn[3:])}) == 4


class Launched(TorchDispatchMode):
    """Notes on which stream operators run that are not captured."""

    def __init__(self):
        super().__init__()
        self.streams = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not torch.cuda.is_current_stream_capturing():
            self.streams.append(torch.cuda.current_stream())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stream", [torch.cuda.default_stream, torch.cuda.Stream])
def test_a_capture_launches_nothing_on_a_stream_of_its_own(gpu, stream):
    x, caller = torch.zeros(4, device="cuda:0"), stream("cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(caller), Launched() as launched, gpu.graphs.lock:
        graph = torch.cuda.CUDAGraph()
        with capture(gpu, graph):
            x += torch.rand(4, device="cuda:0") + 1
        graph.replay()
        capture_nothing()
        assert gpu.graphs.pool
    assert set(launched.streams) <= {caller}
    torch.cuda.synchronize()
    assert bool((x >= 1).all())


def test_is_capturing(gpu):
    assert not gpu.is_capturing()
    seen = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.append(gpu.is_capturing())
    assert seen == [True]


def test_a_prepared_thread_may_query_while_another_captures_in_global_mode(gpu):
    event = gpu.events.acquire()
    event.record(gpu.current_stream())
    torch.cuda.synchronize()
    capturing, queried, answers = threading.Event(), threading.Event(), []

    def work():
        with gpu.driver.in_thread():
            capturing.wait()
            answers.append(event.query())
            answers.append(gpu.pinned(5_000_000).is_pinned())  # a cudaHostAlloc
            queried.set()

    thread = threading.Thread(target=work)
    thread.start()
    x = torch.ones(100, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # "global": PyTorch's default, in which another thread's query destroys the capture
        y = x + 1
        capturing.set()
        queried.wait(HANG_S)
        y = y + 1
    thread.join()
    graph.replay()
    assert answers == [True, True]
    assert bool((y == 3).all())


def test_the_guard_restores_device_and_streams(gpu):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()

    def disturb():
        with guard("cuda:0"):
            assert torch.cuda.current_stream() == side
            torch.cuda.set_stream(other)
            raise KeyError

    with torch.cuda.stream(side):
        with pytest.raises(KeyError):
            disturb()
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_device() == 0


def test_the_guard_between_two_devices():
    two_gpus()
    side = torch.cuda.Stream("cuda:1")
    with guard("cuda:1"):
        assert torch.cuda.current_device() == 1
        torch.cuda.set_stream(side)
        torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:1") == torch.cuda.default_stream("cuda:1")


def test_a_helper_thread_works_on_its_place():
    two_gpus()
    seen = []

    def work():
        with context("cuda:1").driver.in_thread():
            seen.append(torch.empty(1, device="cuda").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    context("cuda:1").close()
    assert seen == [1]


def test_close_and_a_new_context():
    old = context("cuda:0")
    old.streams[0]
    old.pinned(100)
    old.close()
    with pytest.raises(DeviceError, match="closed"):
        old.streams[0]
    new = context("cuda:0")
    assert new is not old
    new.close()


def test_the_interpreter_ends_cleanly_with_everything_in_use():
    output_of("""
        import torch
        from millstream.device import context
        from millstream.device.drivers.driver import Copies
        c = context("cuda:0")
        block, event = c.pinned(1 << 20), c.events.acquire()
        torch.cuda._sleep(50_000_000)
        c.driver.copy(Copies([(torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0"), block)], c.streams.to_device))
        event.record(c.streams.to_device)
        c.release_pinned(block, after=event)
    """)


def test_a_forked_child_sees_no_context():
    out = output_of("""
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from millstream.device import context
        from millstream.errors import DeviceError
        c = context("cuda:0")
        block, event = c.pinned(1 << 20), c.events.acquire()
        event.record(c.streams[0])
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                c.streams[0]
            except DeviceError:
                pass
            else:
                os._exit(1)
            c.close()
            os._exit(0)  # as children of multiprocessing end; PyTorch itself aborts one that drops pinned memory
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert out == "0\n"
