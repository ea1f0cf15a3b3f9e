"""Fused Triton kernels that are launched before the kernel ahead of them has ended, to hide the time of a launch.

CUDA calls this *programmatic dependent launch* (compute capability 9.0 and above). On a stream, such a kernel may start
as soon as every block of the kernel ahead of it has ended or *triggered*; captured into a graph, that order becomes a
programmatic edge. What it may touch is its own affair: ``gdc_wait`` holds it back until the kernels ahead of it have
completed and their memory operations are visible.

**Contract**
- A kernel that launches so waits in its very first line, whatever it does then: before it reads, writes or triggers,
  in every thread of every block. A kernel without that line launches as ever.
- Only what Inductor fuses launches so: no templates, no kernels written by the user, and none whose blocks must all run
  at once (cooperative launches).

**Why that is safe**
- Memory. Up to the wait a kernel uses nothing but its registers, so all that can go wrong, WAR in reused memory
  included, would have to go wrong behind it; there it stands where an ordinary launch would.
- Chains. B waits for A, and C for B. No block of B ends before A has completed and is visible, so B completes after A,
  and C comes after both; it need not know of A. That is why no kernel may leave the wait out, not even one that shares
  no memory with the kernel ahead: Inductor's own placement (``triton.enable_pdl``) does leave it out, knows one stream,
  its own order and no reused memory, and therefore stays off.
- Ordinary neighbours. Ordinary launches, copies and fills come after full completion of what is ahead of them. Behind
  a copy or a fill a kernel of ours starts when that has ended, for programmatic edges join kernels only; behind an
  ordinary kernel, when its blocks have ended or triggered, and waits.
- Several streams. An event of another stream is waited for in full, or by an edge for which ``gdc_wait`` waits as well
  (it waits for all prerequisites); an event recorded behind C lies behind A for the same reason as C does.
- Triggers. A kernel triggers behind its wait: what may start then is the next kernel, which waits for it. Library
  kernels that start early themselves (CCCL, CUTLASS) keep to the same rule; ordinary ones never start early.

Sources: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization" (4.5) and "CUDA Graphs" (4.2, edge
data); ``CUgraphEdgeData`` of the driver API; ``griddepcontrol`` of the PTX ISA, whose ``wait`` lasts "until all
prerequisite grids in flight have completed and all the memory operations from the prerequisite grids are performed and
made visible to the current grid".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from millstream.errors import ArgumentError

#: Environment variable, read when a graph is lowered: 0 launches as ever, 1 waits, 2 also triggers right behind it.
VARIABLE = "MILLSTREAM_DEPENDENT_LAUNCH"
DEFAULT = "0"

WAIT, TRIGGER = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"

_KERNEL = re.compile(
    r"^@triton_heuristics\.(?:pointwise|reduction|persistent_reduction|split_scan|foreach)\(\n"
    r"(?P<metadata>(?:(?!@triton).*\n)+)@triton\.jit\ndef .*\):\n",
    re.MULTILINE,
)
_CAPABILITY = re.compile(r"DeviceProperties\(type='cuda',[^)]*\bcc=(\d+)")


def with_dependent_launch(make_scheduling: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the backend that Inductor makes for CUDA define its kernels as the setting asks.

    Here the source is changed before anything is compiled or named after it, so that no cache mixes settings.

    Args:
        make_scheduling: Makes the backend from Inductor's scheduler, or from ``None`` to ask what it can do.

    Raises:
        ArgumentError: The environment variable holds none of 0, 1 and 2.
    """
    setting = os.environ.get(VARIABLE) or DEFAULT
    if setting not in ("0", "1", "2"):
        raise ArgumentError(f"{VARIABLE}={setting!r} is no setting; give 0 (off), 1 (wait) or 2 (wait and trigger).")
    if setting == "0":
        return make_scheduling

    def make(scheduler: Any) -> Any:
        backend = make_scheduling(scheduler)
        triton = getattr(backend, "_triton_scheduling", None)
        if triton is not None:
            define = triton.define_kernel
            triton.define_kernel = lambda source, *args: define(
                launch_dependently(source, trigger=setting == "2"), *args
            )
        return backend

    return make


def launch_dependently(source: str, *, trigger: bool) -> str:
    """Let a kernel start early and wait in its first line; return the source of any other kernel unchanged.

    Args:
        source: What Inductor generates for one Triton kernel.
        trigger: Whether it lets the next kernel start right behind the wait.
    """
    kernel = _KERNEL.search(source)
    if kernel is None or "'launch_cooperative_grid': True" in kernel["metadata"]:
        return source
    capability = _CAPABILITY.search(kernel["metadata"])
    if capability is None or int(capability[1]) < 90:
        return source
    metadata = kernel["metadata"].replace("'launch_pdl': False, ", "")
    metadata = metadata.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
    first = f"    {WAIT}\n" + f"    {TRIGGER}\n" * trigger
    head = source[: kernel.start("metadata")] + metadata + source[kernel.end("metadata") : kernel.end()]
    return head + first + source[kernel.end() :]
