import ctypes
import shutil
import types
from contextlib import contextmanager

import pytest
import torch

from millstream import _native
from millstream._torch.tensors import storage_view
from millstream.device import context
from millstream.device.copying import Enqueuer
from millstream.device.cuda_graphs import memcpy_nodes
from millstream.engine.cuda import batched_copy, captured, cuda_graph, graph_io, in_place
from tests.engines.host_driver import GRAPH, STREAM, HostDriver, launch


@pytest.fixture
def host_driver(monkeypatch):
    """Let the host's memory be carried as a device's is, by a driver that copies at once."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    driver, core = HostDriver(), _native.load("core")
    enqueuer = Enqueuer(core, driver.cuMemcpyAsync, driver.cuEventRecord, driver.cuStreamWaitEvent)
    library = memcpy_nodes.MemcpyLibrary(core, driver)
    monkeypatch.setattr(batched_copy, "enqueuer", lambda: enqueuer)
    monkeypatch.setattr(graph_io, "memcpy_library", lambda: library)
    for module in (batched_copy, graph_io):
        monkeypatch.setattr(module, "current_stream_handle", lambda _: STREAM)
    monkeypatch.setattr(batched_copy, "_on_device", lambda _: True)
    return driver


class PretendedGraph:
    """A CUDA graph on the CPU: its launches are repeated on the memory they were captured on, by address."""

    latest = None

    def __init__(self, keep_graph=False):
        PretendedGraph.latest = self
        self.launch = None
        self.num_replays = 0
        self.entries, self.exits = [], []

    def instantiate(self):
        pass

    def raw_cuda_graph_exec(self):
        return GRAPH

    def replay(self):
        self.num_replays += 1
        launch(self.entries)
        self.launch()
        launch(self.exits)

    def pool(self):
        return (0, 7)


def at_address(value):
    """The same memory, without keeping it alive."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * value.element_size())).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.shape, value.stride())


@pytest.fixture
def device(monkeypatch, host_driver):
    """A CPU on which programs can be captured.

    Returns the pools that were captured into, what to fail with, errors of the driver, the device's free memory and all
    of it, how many captures there were when PyTorch's cache was emptied, and errors that were repaired.
    """
    compile_plan = captured.compile_plan
    seen = types.SimpleNamespace(
        pools=[], error=None, driver=host_driver, memory=(80 << 30, 80 << 30), emptied=[], repairs=[]
    )

    @contextmanager
    def capture(context, graph, pool):
        seen.pools.append(pool)
        if seen.error is not None:
            raise seen.error
        graph.num_before = len(host_driver.nodes)
        yield
        nodes = host_driver.nodes[graph.num_before :]
        graph.entries, graph.exits = nodes[: graph.num_entries], nodes[graph.num_entries :]

    def compile_recorded(program, plan, bound, **kwargs):
        run, graph = compile_plan(program, plan, bound, **kwargs), PretendedGraph.latest

        def record(inputs):
            held = [at_address(item) for item in inputs]
            before = [item.clone() if isinstance(item, torch.Tensor) else None for item in held]
            state = torch.get_rng_state()
            outputs = run(inputs)
            torch.set_rng_state(state)
            graph.num_entries = len(host_driver.nodes) - graph.num_before
            for item, value in zip(held, before, strict=True):  # a capture runs nothing
                if value is not None:
                    storage_view(item).copy_(storage_view(value))

            def launch():
                for output, value in zip(outputs, run(list(held)), strict=True):
                    if isinstance(output, torch.Tensor) and output.data_ptr() != value.data_ptr():
                        output.copy_(value)

            graph.launch = launch
            return outputs

        record.events = []
        return record

    def same_addresses(tensors, addresses, positions):
        return all(tensors[position].data_ptr() == addresses[position] for position in positions)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: context("cpu").place.index)
    monkeypatch.setattr(captured, "capture", capture)
    monkeypatch.setattr(captured, "compile_plan", compile_recorded)
    monkeypatch.setattr(captured, "same_addresses", same_addresses)
    for module in (captured, cuda_graph):
        monkeypatch.setattr(module, "current_stream_handle", lambda index: None)
    monkeypatch.setattr(cuda_graph, "repair", lambda context: seen.repairs.append(seen.error))
    monkeypatch.setattr(captured, "take_workspaces", lambda context, program, numbers: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: seen.memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.emptied.append(len(seen.pools)))
    monkeypatch.setattr(in_place, "FORCED", True)
    torch._dynamo.reset()
    return seen
