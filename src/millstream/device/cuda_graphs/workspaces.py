"""Memory in which cuBLAS works while a graph runs.

PyTorch gives cuBLAS a workspace on each stream, 32 MiB or so, when the first product runs there, and keeps it. A graph
bakes the address in, but does not own the memory: PyTorch lets go of all workspaces whenever it captures graphs of its
own (``mode="reduce-overhead"``), and it may have lain in the memory of a graph that is gone. So it would be unmapped,
or be given to others, while a graph still writes there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from millstream.device.context import DeviceContext
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.guard import guard
from millstream.graph import KernelKind
from millstream.program import Program


def take_workspaces(context: DeviceContext, program: Program, numbers: Iterable[int]) -> None:
    """Let the workspaces of some streams lie in a pool of their own, before plans are captured on these streams.

    Whoever drops a workspace leaves its memory to that pool, which lives as long as the context, and from which nothing
    else is ever taken. Graphs share it, as they run one at a time. Without products, and control flow, which may have
    some, nothing is taken.
    """
    if not any(kernel.kind in (KernelKind.GEMM, KernelKind.CONTROL) for kernel in program.graph.kernels):
        return
    origin, streams = context.streams[0], [context.streams[number] for number in numbers]
    before = context.events.acquire()
    try:
        with guard(context.place):
            torch.cuda.current_blas_handle()  # each thread has its own, and making it ends a capture
        with guard(context.place), capture(context, torch.cuda.CUDAGraph(), context.graphs.workspace_pool):
            before.record(origin)
            for stream in streams:  # one after the other: what is captured on several must come together again
                with context.on(stream):
                    if stream is not origin:
                        stream.wait_event(before)
                    small = torch.ones(16, 16, device=context.torch_device, dtype=torch.half)
                    torch.addmm(small[0], small, torch.mm(small, small))  # by cuBLAS, and by cuBLASLt
                    before.record(stream)
            origin.wait_event(before)
    finally:
        context.events.release(before)
