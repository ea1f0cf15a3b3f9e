"""Launch our own kernels: compiled while Inductor does its part, and started early.

Triton compiles a kernel where it is launched first, one after the other. Of the 77 s that NASNet-A took on an H200's
host, 32 went there: a depthwise convolution's loops are unrolled, and a pass of Triton's takes the square of their
length. But Triton gives Python's lock away meanwhile, and what a launch depends on is known before Inductor begins.

CUDA calls an early start a programmatic dependent launch. Blocks are placed and addresses computed while the kernel in
front ends; then each block waits (``gdc_wait``) until all that it comes after has ended, and only then reads or writes.
When its products are summed, the kernel lets the one after it start likewise (``gdc_launch_dependents``). So every
kernel launched in this way must wait before its first access, whatever it reads: what it comes after is decided by the
plan. Inductor's own way of it leaves waits out where program order needs none, and stays off (``lower/compile.py``).

One access may come before the wait: a load from memory that no kernel of the same CUDA graph writes
(``early_loads.py``). All of our kernels wait before they let the next one start; so when a kernel starts early, all but
the one directly in front have ended, and that one does not write there either.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._inductor.async_compile import get_compile_threads


class TritonLaunch(NamedTuple):
    """A Triton kernel and what it is to be launched with.

    Attributes:
        kernel: It.
        grid: How many blocks there are, in each of three directions.
        arguments: Tuples of real tensors, or of fake ones where it is only to be compiled; numbers, and tuples of them.
        constants: What it is compiled for, and how.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch it on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        """Only compile it, for tensors that are aligned."""
        self.kernel.warmup(*map(_described, self.arguments), grid=self.grid, **self.constants)

    @property
    def variant(self) -> tuple[Any, ...]:
        """The same for launches of the same compiled kernel."""
        return self.kernel, *map(_described_roughly, self.arguments), *sorted(self.constants.items())


def pointers(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors as one argument, with more after them that nobody looks at, so that few numbers of them occur."""
    given = tuple(tensors)
    return given + given[:1] * ((1 << (len(given) - 1).bit_length()) - len(given))


@dataclass(frozen=True)
class _Aligned:
    """The alignment that Triton asks of a tensor when it compiles for it."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def _described(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_described, argument))
    return _Aligned(argument.dtype) if isinstance(argument, torch.Tensor) else argument


def _described_roughly(argument: Any) -> Any:
    """Numbers are not specialized for."""
    if isinstance(argument, tuple):
        return tuple(map(_described_roughly, argument))
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


@contextlib.contextmanager
def compiling(launches: Iterable[TritonLaunch]) -> Iterator[None]:
    """Compile kernels in other threads, until the end of the body at least.

    What cannot be compiled says so where it is launched.

    Args:
        launches: Of kernels that are specialized for no number. Not asked for where there is no Triton.
    """
    mode = _asynchronous_mode()
    variants = [*{launch.variant: launch for launch in launches}.values()] if mode else []
    if not variants:
        yield
        return
    (first, *_) = variants[0].arguments
    device = (first[0] if isinstance(first, tuple) else first).device
    with (
        ThreadPoolExecutor(min(len(variants), get_compile_threads()), "millstream-compile") as pool,
        ThreadPoolExecutor(1, "millstream-compile") as starter,
    ):
        starter.submit(_compile, variants, mode(pool, ignore_errors=True), device)
        yield


def _compile(variants: Sequence[TritonLaunch], mode: Any, device: torch.device) -> None:
    with torch.cuda.device(device), mode:
        for launch in variants:
            with contextlib.suppress(Exception):
                launch.compile()


def _asynchronous_mode() -> Any:
    """Triton's way to compile in other threads; ``None`` where it has none."""
    try:
        import triton  # pyrefly: ignore[missing-import]
    except ImportError:
        return None
    return getattr(triton, "AsyncCompileMode", None)


# --- started early ---------------------------------------------------------------------------------------------------

_FIRST_CAPABILITY = (9, 0)


@functools.cache
def dependent_launch_options(device: torch.device) -> dict[str, bool]:
    """Return how to launch a kernel that has an argument ``STARTS_EARLY``, on a GPU that can do it and on others."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"STARTS_EARLY": False}
    return {"STARTS_EARLY": True, "launch_pdl": True}
