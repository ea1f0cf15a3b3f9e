"""What only happens on a GPU, tried on a pretended one: a stream with a clock, an allocator with a counter."""

import pytest
import torch

from benchmarks.measuring import harness
from benchmarks.measuring.harness import MemoryMeter, check_ordered, device_clock

CUDA = torch.device("cuda", 0)
SPIN_MS, RUN_MS = 0.25, 1.0


class Stream:
    """The device's clock; the host takes no time but waiting."""

    def __init__(self):
        self.end_ms = 0.0

    def queue(self, ms):
        self.end_ms += ms


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at_ms = self.stream.end_ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: stream.queue(SPIN_MS))
    monkeypatch.setattr(harness, "wall_ms", lambda run, device, calls=1: RUN_MS)
    monkeypatch.setattr(harness, "use_second_stream", lambda device: stream.queue(SPIN_MS))
    return stream


def test_device_time_is_that_of_the_run_without_the_spin(stream):
    assert device_clock(lambda: stream.queue(RUN_MS), CUDA)() == pytest.approx(RUN_MS)


def test_work_on_another_stream_is_not_timed(stream):
    with pytest.raises(RuntimeError, match="not ordered"):
        check_ordered(lambda: Stream().queue(RUN_MS), CUDA)


class Allocator:
    def __init__(self):
        self.now = self.peak = 100

    def allocate(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            self.begun = capture_error_mode

        def capture_end(self):
            self.ended = True

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(allocator, "peak", allocator.now))
    monkeypatch.setattr(harness, "take_workspaces", lambda device: allocator.allocate(1 << 25))
    return allocator


def test_memory_is_metered_while_a_graph_is_captured(allocator):
    begin = torch.cuda.CUDAGraph.capture_begin
    meter = MemoryMeter(CUDA)
    with meter.measure():
        allocator.allocate(1000)  # autotuning
        allocator.allocate(-1000)
        allocator.allocate(10)  # static inputs
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        allocator.allocate(7)  # a temporary
        allocator.allocate(-7)
        allocator.allocate(2)  # an output
        graph.capture_end()
    assert graph.begun == "thread_local"
    assert graph.ended
    assert meter.peak_bytes == 17
    assert torch.cuda.CUDAGraph.capture_begin is begin


def test_without_a_capture_there_is_no_peak(allocator):
    meter = MemoryMeter(CUDA)
    with meter.measure():
        allocator.allocate(10)
    assert meter.peak_bytes is None
