"""The driver of a CUDA device, through ``torch.cuda`` and CUDA's own driver."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millstream._torch.devices.capture_generators import aside
from millstream._torch.devices.raw_streams import (
    RunOn,
    current_device,
    current_stream_handle,
    event_type,
    is_capturing,
    stream_setter,
)
from millstream._torch.tensors import mark_use
from millstream.device.copying import enqueuer, with_pointer
from millstream.device.drivers.driver import Copies, GraphPool, make_copies
from millstream.device.drivers.lending import lend, see_alike, whole_storage
from millstream.device.guard import guard
from millstream.device.handles import Event, Stream
from millstream.device.place import Place


class CudaDriver:
    """One CUDA device, through ``torch.cuda``. Making the driver initialises CUDA.

    Args:
        place: The device; it exists.
    """

    def __init__(self, place: Place) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.place = place
        self.torch_device = place.torch_device
        self._anchors: list[torch.cuda.CUDAGraph] = []
        self.current_stream_id = functools.partial(current_stream_handle, place.index)
        self._found: tuple[int, Stream] | None = None  # the stream that was current when somebody asked last

    def make_stream(self, *, high_priority: bool) -> Stream:
        """Make a stream that never blocks on the default stream.

        One of normal priority is nobody else's, since graphs are captured on it: what PyTorch keeps for a stream, such
        as cuBLAS's workspace, is then for them alone. It is never destroyed: PyTorch's allocator remembers it. Where
        the driver does not make one, it is the next of PyTorch's 32 streams, and so is every one of high priority.
        """
        if not high_priority and (handle := self._make_stream()):
            own: Stream = torch.cuda.ExternalStream(handle, self.torch_device)  # type: ignore[no-untyped-call]
            return own
        priority = -1 if high_priority else 0
        stream: Stream = torch.cuda.Stream(self.torch_device, priority=priority)  # type: ignore[no-untyped-call]
        return stream

    def _make_stream(self) -> int | None:
        create, handle = _find("cuStreamCreate"), ctypes.c_void_p()
        with guard(self.place):
            made = create is not None and create(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING)) == 0
        return handle.value if made else None

    def make_event(self, *, timing: bool) -> Event:
        """Make an event; the runtime creates it when it is first recorded, on the device of that stream."""
        event: Event = event_type()(enable_timing=timing)  # type: ignore[no-untyped-call]
        return event

    def current_stream(self) -> Stream:
        """The calling thread's current stream on this device, whichever device is current."""
        found, handle = self._found, current_stream_handle(self.place.index)
        # PyTorch's class for CUDA takes a microsecond to make an object, which is nearly always the same.
        if found is None or found[0] != handle:
            found = self._found = handle, torch.cuda.current_stream(self.place.index)
        return found[1]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """PyTorch's own stream context: sets the device too, and restores both."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def stream_id(self, stream: Any) -> int:
        """CUDA's handle."""
        handle: int = stream.cuda_stream
        return handle

    def is_current(self) -> bool:
        """Ask the runtime."""
        return current_device() == self.place.index

    def is_capturing_elsewhere(self) -> bool:
        """Ask about the stream of the device that is current."""
        return current_device() != self.place.index and torch.cuda.is_current_stream_capturing()

    def entry(self, stream: Any) -> Callable[[], Any]:
        """PyTorch's compiled function, with the stream bound to it."""
        return stream_setter(stream)

    def blas_handle(self) -> int:
        """PyTorch's, made on first use."""
        return int(torch.cuda.current_blas_handle())

    def workspace_bytes(self) -> int:
        """As PyTorch does: by ``CUBLAS_WORKSPACE_CONFIG``, or else 32 MiB from Hopper on and 4224 KiB before."""
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        pairs = re.findall(r":(\d+):(\d+)", config)
        if pairs:
            return 1024 * sum(int(size) * int(count) for size, count in pairs)
        return (32768 if torch.cuda.get_device_capability(self.place.index) >= (9, 0) else 4224) * 1024

    def guard(self) -> AbstractContextManager[Any]:
        """As everybody's."""
        return guard(self.place)

    def mark_use(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """By ``record_stream``."""
        mark_use(storage, stream)

    def is_capturing(self) -> bool:
        """Ask the runtime about the current stream of this device; does not disturb a capture."""
        return is_capturing(self.place.index)

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate from PyTorch's cache, which takes and gives memory per stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def lend(self, memory: Tensor, token: object) -> Tensor:
        """By compiled code, or else by way of the CUDA array interface: PyTorch keeps the object that offers it."""
        if (lent := lend(memory, token)) is not None:
            return lent
        return see_alike(torch.as_tensor(_Lent(whole_storage(memory), token), device=self.torch_device), memory)

    def copy(self, copies: Copies) -> None:
        """Enqueue all of it, where possible in one call.

        From pageable memory the call returns once the driver has taken the source's bytes.
        """
        enqueue = self.prepare_copy(copies)
        if enqueue is None or enqueue() != 0:
            with self.on(copies.stream):
                make_copies(copies)  # after an error PyTorch is left to meet it, and to say what it is

    def prepare_copy(self, copies: Copies) -> Callable[[], int] | None:
        """In compiled code, for bytes that lie close together, and events that have been recorded before."""
        compiled, (pairs, stream, *events) = enqueuer(), copies
        # PyTorch creates an event when it is first recorded, and makes the thread ready for its device.
        waits, before, after = ([event.cuda_event for event in each] for each in events)
        if compiled is None or 0 in (*waits, *before, *after) or not after:
            return None
        ranges = []
        for to, source in pairs:
            if not (to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype):
                return None
            if num_bytes := to.nbytes:
                ranges.append((to.data_ptr(), source.data_ptr(), num_bytes))
        return compiled.order(stream.cuda_stream, waits, before, ranges, after)

    def pin(self, num_bytes: int) -> Tensor:
        """Allocate page-locked memory. Slow, and forbidden while a graph is captured (hold the capture lock).

        On a machine of several NUMA nodes the memory lies on the device's: from another one copies are a third slower.
        """
        with _run_on(_processors_near(self.place)):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def name_graph_pool(self) -> GraphPool:
        """A name that no other has; there is no pool until a graph is captured into it."""
        first, second = torch.cuda.graph_pool_handle()
        return (first, second)

    def make_graph_pool(self) -> GraphPool:
        """Make a new pool; PyTorch gives it memory when a graph is captured into it.

        An empty graph stays in it: a pool that no graph uses any more while a tensor still lies in it cannot be
        captured into again (PyTorch 2.11 asserts).
        """
        pool = self.name_graph_pool()
        with guard(self.place):
            self._anchors.append(capture_nothing(pool))
        return pool

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Set the thread's device, and have it spare captures.

        A new thread starts on device 0, whatever its parent used: without this its allocations and its streams would
        silently belong to another GPU.
        """
        with guard(self.place), self.spare_captures():
            yield

    def spare_captures(self) -> AbstractContextManager[Any]:
        """By the mode that CUDA has for each thread."""
        return _SpareCaptures()

    def synchronize(self) -> None:
        """Wait for all streams of the device, the user's included."""
        torch.cuda.synchronize(self.torch_device)


def capture_nothing(pool: GraphPool | None = None) -> torch.cuda.CUDAGraph:
    """Capture an empty graph on the current device, after all of its work so far and in front of all that follows.

    Args:
        pool: For its memory; ``None`` for one of its own.
    """
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    randomness = aside(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch doubts that an empty graph is meant
        captured = torch.cuda.graph(graph, pool, torch.cuda.Stream(), "thread_local")  # type: ignore[arg-type]
        try:
            with RunOn(caller), randomness.begin(), captured:
                pass
        finally:
            randomness.end()
    caller.synchronize()  # where the random offset was reset, see ``capturing.capture``
    return graph


class _Lent:
    """Device memory, offered to PyTorch as if another library owned it."""

    def __init__(self, memory: Tensor, token: object) -> None:
        self.memory, self.token = memory, token
        address = memory.data_ptr()
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (memory.numel(),),
            "strides": None,
            "typestr": "|u1",
            "version": 2,  # of the interface: 3 adds a stream to wait for, and there is nothing to wait for
        }


def _processors_near(place: Place) -> set[int]:
    """Numbers of the processors on the device's NUMA node; empty when the system does not say (only Linux does)."""
    try:
        gpu: Any = torch.cuda.get_device_properties(place.index)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        ranges = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text().strip().split(",")
        bounds = [[int(number) for number in each.split("-")] for each in ranges]
    except (AttributeError, OSError, ValueError):
        return set()
    return {number for each in bounds for number in range(each[0], each[-1] + 1)}


@contextmanager
def _run_on(processors: set[int]) -> Iterator[None]:
    """Keep the calling thread on some processors, as far as it may use them; then let it run where it could before."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    if not processors & before:
        yield
        return
    os.sched_setaffinity(0, processors & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class _SpareCaptures(AbstractContextManager[None]):
    """Let this thread query events and allocate while *another* thread captures in CUDA's default, global mode.

    In that mode one "potentially unsafe" call of any thread (``cudaEventQuery``, ``cudaMalloc``, ``cudaHostAlloc``)
    destroys the capture. A thread escapes the rule by declaring itself thread-local, which the driver's
    ``cuThreadExchangeStreamCaptureMode`` (CUDA 10.1 and later) does; ``torch.cuda`` does not offer it. Where the call
    is not to be had (ROCm), nothing happens, and only captures that hold the capture lock are safe.
    """

    __slots__ = ("_exchange", "_mode")

    def __init__(self) -> None:
        exchange, self._mode = _find("cuThreadExchangeStreamCaptureMode"), ctypes.c_int()
        self._exchange = None if exchange is None else with_pointer(exchange, self._mode)

    def __enter__(self) -> None:
        if self._exchange is not None:
            self._mode.value = _THREAD_LOCAL
            if self._exchange() != 0:
                self._exchange = None

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange()  # the first exchange left the previous mode there


@functools.cache
def _find(name: str) -> Any:
    """A function of the CUDA driver; ``None`` where there is none."""
    try:
        return getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
