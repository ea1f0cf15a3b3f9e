"""What a copy from one GPU to another costs: measured once, and kept on disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream.cost import Link, Rate
from millstream.device import DeviceContext, context, guard
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.peer_copies import copy_across, reach
from millstream.engine.planning.store import Store
from millstream.errors import DeviceError

LARGE_BYTES, LARGE_COPIES = 64 << 20, 12
"""What is copied to see how quick a link is, and how often: on the slowest that there are, a tenth of a second."""
SMALL_BYTES, ROUNDS = 4096, 25
"""What is copied to see what a copy takes that waits for another one, and how often there and back."""


@functools.cache
def gpu_link(first: str, second: str) -> Link:
    """Return what a copy between two GPUs costs, by the slower direction.

    Args:
        first: Name of one.
        second: Of the other.

    Raises:
        DeviceError: The driver copies nothing.
    """
    ends = context(first), context(second)
    name = "peer access" if reach(*sorted(end.place.index for end in ends)) else "no peer access"
    store, key = Store(ends[0].torch_device), f"link of {', '.join(_address(end) for end in ends)}, {name}"
    noted = dict(store.load_choice(key) or {})
    try:
        rate = Rate(0, float(noted["hop_ns"]), float(noted["bytes_per_s"]))
    except (KeyError, TypeError, ValueError):
        with ends[0].capture_lock:
            rate = _measure(ends)
        store.save_choice(key, {"hop_ns": rate.hop_ns, "bytes_per_s": rate.bytes_per_s})
    return Link(name, (rate,), "measured", measured_devices=2)


def _address(end: DeviceContext) -> str:
    """Of a device on its bus: its number may be another one's in another process."""
    properties = torch.cuda.get_device_properties(end.place.index)
    return str(getattr(properties, "uuid", end.place))


def _measure(ends: tuple[DeviceContext, DeviceContext]) -> Rate:
    large = [torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=end.torch_device) for end in ends]
    small = [tensor[:SMALL_BYTES] for tensor in large]

    def send(tensors: list[torch.Tensor], to: int) -> None:
        with ends[to].on(ends[to].streams[0]):
            copy_across(tensors[to], tensors[1 - to], stream=current_stream_handle(ends[to].place.index))

    def order(first: int) -> None:
        event = ends[first].events.acquire()
        event.record(ends[first].streams[0])
        ends[1 - first].streams[0].wait_event(event)
        ends[first].events.release(event)

    def there_and_back() -> None:
        for _ in range(ROUNDS):
            order(0)
            send(small, 1)
            order(1)
            send(small, 0)

    def send_often(to: int) -> None:
        for _ in range(LARGE_COPIES):
            send(large, to)

    slowest_ns = max(_taken_ns(functools.partial(send_often, to), ends) for to in (0, 1)) / LARGE_COPIES
    hop_ns = _taken_ns(_captured(there_and_back, ends) or there_and_back, ends) / (2 * ROUNDS)
    return Rate(0, hop_ns, LARGE_BYTES * 1e9 / max(slowest_ns - hop_ns, 1))


def _captured(work: Callable[[], None], ends: tuple[DeviceContext, DeviceContext]) -> Callable[[], None] | None:
    """Return what does the work as a graph, which is not held up by the host; ``None`` where that cannot be."""
    home, graph = ends[0], torch.cuda.CUDAGraph()
    with home.graphs.lock, guard(home.place):
        try:
            with capture(home, graph):
                work()
        except (DeviceError, RuntimeError, torch.AcceleratorError):
            return None  # which ``capture`` has cleaned up after
    return graph.replay


def _taken_ns(work: Callable[[], None], ends: tuple[DeviceContext, DeviceContext]) -> int:
    """Return how long work takes the second time, until both devices are done."""
    with guard(ends[0].place):
        for _ in range(2):
            for end in ends:
                end.synchronize()
            start = time.perf_counter_ns()
            work()
            for end in ends:
                end.synchronize()
        return time.perf_counter_ns() - start
