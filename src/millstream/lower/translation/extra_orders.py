"""Orders between kernels that come of no data: checks before writes, and a whole before its parts."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

from millstream.graph import Buffer, Kernel, KernelGraph, derive_dependencies
from millstream.lower.translation.memory_table import MemoryTable
from millstream.program import WHOLE


def order_checks(kernels: list[Kernel], raising: set[int], inputs: set[str], memory: MemoryTable) -> None:
    """On a CPU, let what writes to inputs come after what may raise, which then leaves them all as they were.

    To kernels that may raise there is something to read, and each of the others writes a part of it. On a GPU such
    an error is the end of the context anyway.

    Args:
        kernels: Changed in place.
        raising: Those that may raise for the values that they get.
        inputs: Names of the graph's.
        memory: Of the graph.
    """
    writing = {kernel.id for kernel in kernels if not inputs.isdisjoint(map(memory.owner, kernel.writes))}
    may_raise = raising - writing
    if not writing or not may_raise or {*memory.device.values()} != {"cpu"}:
        return
    whole = f"{WHOLE}cpu"
    memory.bytes[whole], memory.device[whole] = 16, "cpu"
    for kernel in kernels:
        if kernel.id in may_raise:
            kernels[kernel.id] = replace(kernel, reads=(*kernel.reads, whole))
        elif kernel.id in writing:
            both = (*kernel.writes, whole), (*kernel.parts, whole)
            kernels[kernel.id] = replace(kernel, writes=both[0], parts=both[1])


def open_joined(name: str, kernels: list[Kernel], joined: dict[str, list[int]], buffers: tuple[Buffer, ...]) -> None:
    """Say for each concatenation that a kernel writes the whole before others write parts, so that it has memory.

    If possible a kernel that all of these come after anyway, which in truth writes nothing there: the last of
    them, for the memory's sake. Else the first of these is taken to write the whole.

    Args:
        name: Of the graph.
        kernels: Changed in place.
        joined: By concatenation, the kernels that write its parts.
        buffers: Of the graph.
    """
    if not joined:
        return
    behind: list[int] = []  # for each kernel those that it comes after, as bits
    for found in derive_dependencies(KernelGraph(name, tuple(kernels), buffers)):
        mask = 0
        for each in found:
            mask |= behind[each.kernel] | 1 << each.kernel
        behind.append(mask)
    for whole, writers in joined.items():
        common = functools.reduce(operator.and_, (behind[writer] for writer in writers))
        if common:
            first = kernels[common.bit_length() - 1]
            kernels[first.id] = replace(first, writes=(*first.writes, whole))
        else:
            kernels[writers[0]] = replace(kernels[writers[0]], parts=())
