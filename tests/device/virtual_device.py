"""A device made of software, as slow, as late and as forgetful as a real one is allowed to be.

Streams are queues whose operations run when the test lets them: at once, at the last possible moment, or at random
times. Memory works as in PyTorch's caching allocator: what the host frees is handed out again at once to the *same
stream*, although operations that use it may still be waiting in queues. Whoever forgets an event gets wrong bytes here,
every time, and not once a week on a loaded machine.
"""

import random
import threading
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from millstream.device.context import DeviceContext
from millstream.device.drivers.lending import lend_host
from millstream.device.place import Place


class VirtualStream:
    def __init__(self, device, name):
        self.device = device
        self.name = name
        self.queue = []  # of (ready, run)
        self.deaf = False  # a planted fault: waits are ignored

    def enqueue(self, run, ready=lambda: True):
        with self.device.lock:
            self.queue.append((ready, run))
            self.device.after_enqueue()

    def wait_event(self, event):
        if self.deaf:
            return
        ticket = event.ticket  # a wait holds the record of *now*, as cudaStreamWaitEvent does
        self.enqueue(lambda: None, ready=lambda: ticket is None or ticket.reached)

    def query(self):
        return not self.queue

    def synchronize(self):
        self.device.run_until(self.query)

    def __eq__(self, other):
        return self is other

    def __ne__(self, other):  # to PyTorch, no stream is unequal to None
        return other is not None and self is not other

    __hash__ = object.__hash__

    def __repr__(self):
        return self.name


class Ticket:
    reached = False
    tick = 0


class VirtualEvent:
    def __init__(self, device):
        self.device = device
        self.ticket = None

    def record(self, stream):
        ticket = Ticket()
        self.ticket = ticket

        def reach():
            ticket.reached, ticket.tick = True, self.device.tick

        stream.enqueue(reach)

    def wait(self, stream):
        stream.wait_event(self)

    def query(self):
        with self.device.lock:
            self.device.num_queries += 1
            self.device.on_query()
            self.device.run_some()  # time passes while the host polls
            return self.device.lies or self.ticket is None or self.ticket.reached

    def synchronize(self):
        ticket = self.ticket
        self.device.run_until(lambda: ticket is None or ticket.reached)

    def elapsed_time(self, end_event):
        if not (self.ticket.reached and end_event.ticket.reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event.ticket.tick - self.ticket.tick


class VirtualDevice:
    """A ``Driver``. ``mood`` says when operations run: "eager", "lazy" (only when the host waits) or "random"."""

    torch_device = torch.device("cpu")

    def __init__(self, mood="lazy", seed=0):
        self.mood = mood
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams = []
        self.default = self._add("default")
        self.local = threading.local()
        self.free = {}  # stream -> size -> raw memory that the host has freed
        self.raw_of = {}  # address -> raw memory: never freed, so that late operations can be watched doing harm
        self.starved = ()  # numbers of streams that run only where no other can
        self.uses = {}  # address -> streams marked as using it
        self.num_pins = self.num_raw = self.num_queries = 0
        self.is_running = False
        self.tick = 0  # the device's clock, in milliseconds: one operation takes one
        self.on_query = lambda: None
        self.refuse_to_pin = False
        self.capturing = self.capturing_elsewhere = False
        self.free_bytes = None  # how much may still be allocated; None: any amount
        self.lies = False  # a planted fault: events say that they are reached

    # --- what a driver does

    def make_stream(self, *, high_priority):
        return self._add(f"{'urgent' if high_priority else 'stream'}{len(self.streams)}")

    def make_event(self, *, timing):
        return VirtualEvent(self)

    def current_stream(self):
        return getattr(self.local, "stream", self.default)

    @contextmanager
    def on(self, stream):
        before = self.current_stream()
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before

    def stream_id(self, stream):
        return id(stream)

    def current_stream_id(self):
        return id(self.current_stream())

    def is_current(self):
        return not self.capturing_elsewhere

    def is_capturing_elsewhere(self):
        return self.capturing_elsewhere

    def entry(self, stream):
        return lambda: setattr(self.local, "stream", stream)

    def blas_handle(self):
        return 1

    def workspace_bytes(self):
        return 64

    def guard(self):
        return nullcontext()

    def mark_use(self, storage, stream):
        self.uses.setdefault(storage.data_ptr(), set()).add(stream)

    def is_capturing(self):
        return self.capturing is True or self.capturing is self.current_stream()

    def allocate(self, num_bytes):
        with self.lock:
            free = self.free.setdefault(self.current_stream(), {}).setdefault(num_bytes, [])
            if free:
                raw = free.pop()
            else:
                if self.free_bytes is not None and self.free_bytes < num_bytes:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                self.num_raw += 1
                raw = np.full(num_bytes, 0xEE, dtype=np.uint8)
                self.raw_of[raw.ctypes.data] = raw
            token = raw[:]  # lives exactly as long as the storage of the tensor made from it
            weakref.finalize(token, self._take_back, raw, free)
            return torch.from_numpy(token)

    def _take_back(self, raw, free):
        """What the host has freed: at once, or where streams are marked as using it, when they have caught up."""
        streams = self.uses.pop(raw.ctypes.data, ())
        left = [0]

        def arrive():
            left[0] -= 1
            if not left[0]:
                free.append(raw)

        left[0] = len(streams)
        for stream in streams:
            stream.enqueue(arrive)
        if not streams:
            free.append(raw)

    def lend(self, memory, token):
        return lend_host(memory, token)

    def copy(self, copies):
        self._prepare(copies)()

    def prepare_copy(self, copies):
        return self._prepare(copies)

    def _prepare(self, copies):
        pairs, stream, waits, before, after = copies
        # A source on this device is not kept alive by the queue either: code that frees it too early reads what came
        # after.
        found = []
        for destination, source in pairs:
            to, come_from = self._find_raw(destination), self._find_raw(source)
            found.append(
                (destination.numpy() if to is None else to, source.numpy() if come_from is None else come_from)
            )

        def enqueue():
            for event in waits:
                event.wait(stream)
            for event in before:
                event.record(stream)
            for to, come_from in found:
                stream.enqueue(lambda to=to, come_from=come_from: np.copyto(to, come_from))
            for event in after:
                event.record(stream)
            return 0

        return enqueue

    def pin(self, num_bytes):
        if self.refuse_to_pin:
            raise RuntimeError("CUDA error: out of memory")
        self.num_pins += 1
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8, device="cpu")

    def name_graph_pool(self):
        return (0, 2)

    def make_graph_pool(self):
        return (0, 1)

    def in_thread(self):
        return nullcontext()

    def spare_captures(self):
        return nullcontext()

    def synchronize(self):
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    # --- what tests do with it

    def raw(self, tensor):
        """The memory under a device tensor, without keeping it from being freed."""
        raw = self._find_raw(tensor)
        assert raw is not None, "not memory of this device"
        return raw

    def _find_raw(self, tensor):
        if tensor.numel() == 0:
            return np.empty(0, dtype=np.uint8)
        start = tensor.data_ptr()
        for address, raw in list(self.raw_of.items()):  # a copy: other threads allocate meanwhile
            if address <= start < address + raw.nbytes:
                return raw[start - address : start - address + tensor.nbytes]
        return None

    def read(self, tensor, results):
        """A kernel on the current stream that appends the bytes of a (contiguous) tensor, as they are when it runs."""
        raw = self.raw(tensor)
        self.current_stream().enqueue(lambda: results.append(raw.tobytes()))

    def scribble(self, num_bytes):
        """A kernel with a temporary: allocated, filled when the kernel runs, freed by the host at once."""
        temporary = self.allocate(num_bytes)
        raw = self.raw(temporary)
        self.current_stream().enqueue(lambda: raw.fill(0xCC))
        del temporary  # not before: another thread might get it

    def run_some(self):
        for _ in range(self.random.randint(1, 4)):
            if not self.run_one():
                return

    def run_one(self):
        with self.lock:
            if self.is_running:  # a finalizer has enqueued something: what comes next waits for what is running
                return False
            runnable = [s for s in self.streams if s.queue and s.queue[0][0]()]
            if not runnable:
                return False
            hungry = [s for s in runnable if self.streams.index(s) not in self.starved]
            self.tick += 1
            self.is_running = True
            try:
                self.random.choice(hungry or runnable).queue.pop(0)[1]()
            finally:
                self.is_running = False
            return True

    def run_until(self, done):
        with self.lock:
            while not done():
                assert self.run_one(), "the device waits for an event that nothing will reach"

    def after_enqueue(self):
        if self.mood == "eager":
            while self.run_one():
                pass
        elif self.mood == "random" and self.random.random() < 0.5:
            self.run_some()

    def _add(self, name):
        stream = VirtualStream(self, name)
        self.streams.append(stream)
        return stream


def make_virtual_context(mood="lazy", seed=0):
    """A context of the place cuda:0 on a virtual device, and that device."""
    device = VirtualDevice(mood, seed)
    return DeviceContext(Place("cuda", 0), device), device
