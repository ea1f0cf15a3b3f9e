"""Other threads, when tensors that they may use are about to have no values: what they are in the middle of ends first.

A method of a tensor looks at the class of the object once, and then refers to what the object holds until it ends,
without the interpreter's lock. Whoever exchanges what an object holds meanwhile lets it compute with memory that is not
there.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from millstream._torch.tensors import FakeTensor, asks_device
from millstream.capture.lines import here
from millstream.capture.state.executed import function_asking
from millstream.errors import CaptureError
from millstream.locks import TRACING

LONGEST_WAIT = 300.0
"""Seconds that another thread waits for tensors that are being traced. Then it has a lock that the step waits for."""

LONGEST_S = 1.0
"""So long a call in another thread is waited for: one that takes longer has long read where its tensors lie."""
_PAUSE_S = 1e-4
_COPYING = {method.__code__ for kind in (Tensor, nn.Parameter) for method in (kind.__deepcopy__, kind.__reduce_ex__)}
"""Python code of PyTorch's that takes it that a tensor keeps its class."""
_COMPILED = ("/torch/_inductor/output_code.py", "/torch/_functorch/_aot_autograd/runtime_wrappers.py")
"""Ends of the names of files through which ``torch.compile`` runs what it has compiled, with tensors as they were."""
_OF_PARAMETERS = {
    Tensor.__deepcopy__: nn.Parameter.__deepcopy__,
    Tensor.__reduce_ex__: nn.Parameter.__reduce_ex__,
    Tensor.__repr__: lambda parameter, **_: repr(parameter),
}
"""What a parameter does in another way than other tensors."""


@functools.lru_cache(maxsize=64)  # what is kept by the type of a tensor is found again in the next trace
def stand_ins_for(thread: int) -> tuple[type[FakeTensor], type[FakeTensor]]:
    """Classes of tensors that are fake for one thread only, and of such parameters; others wait until it has traced.

    What another thread does with such a tensor comes here before PyTorch's C++ code has looked into it, so that after
    the wait it finds the real tensor in the same object. Where the step has made and stored the tensor, what was there
    before takes its place, or where that was none an error. A call that had looked at the object before it was of this
    class, and into it afterwards, comes here as an operator.
    """

    class TracedTensor(FakeTensor):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            func = function_asking(func, sys._getframe(1))
            if threading.get_ident() == thread:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            args, kwargs = _with_values((args, kwargs or {}))
            if args and type(args[0]) is nn.Parameter:
                func = _OF_PARAMETERS.get(func, func)
            return func(*args, **kwargs)

        @classmethod
        def __torch_dispatch__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if threading.get_ident() == thread:
                return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[arg-type]
            if func is asks_device:  # maybe with a lock of autograd's, for which the trace may be waiting
                return args[0].fake_device
            args, kwargs = _with_values((args, kwargs or {}))
            return func(*args, **kwargs)

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            if threading.get_ident() == thread:
                return FakeTensor.device.fget(self)  # type: ignore[attr-defined]
            return _with_values(self).device

    class TracedParameter(TracedTensor):
        _is_param = True  # by which one is known as an instance of ``nn.Parameter``

    for kind in (TracedTensor, TracedParameter):
        kind.__name__ = kind.__qualname__ = "Tensor"  # which programs ask for, and errors say
    return TracedTensor, TracedParameter


_STANDS_FOR = "_millstream_stands_for"


def stand_for(fake: Any, real: Any) -> None:
    """Where another thread has come by a fake tensor, let it have what was there before, or is again."""
    if isinstance(fake, FakeTensor) and isinstance(real, Tensor):
        vars(fake)[_STANDS_FOR] = weakref.ref(real)


def _with_values(given: Any) -> Any:
    """Wait until no thread traces; what is given then, with tensors that have values."""
    if not TRACING.lock.acquire(timeout=LONGEST_WAIT):
        raise CaptureError(
            f"A tensor is being traced by ms.step in another thread, and was not free in {LONGEST_WAIT:.0f} s.",
            remedy="Do not hold a lock here that the step waits for.",
        )
    try:  # with the lock: the next trace may begin at once
        if any(isinstance(each, FakeTensor) for each in tree_leaves(given)):
            return tree_map_only(FakeTensor, _what_it_stands_for, given)
        return given
    finally:
        TRACING.lock.release()


def _what_it_stands_for(fake: FakeTensor) -> Tensor:
    real = vars(fake).get(_STANDS_FOR, lambda: None)()
    if real is not None:
        return real
    raise CaptureError(
        "This tensor was made by a step that another thread has captured, and has no values.",
        where=here(),
        remedy="Take it anew from where you have it.",
    )


def mark_traced(tensors: Sequence[Tensor], kind: type[Tensor], kind_of_parameter: type[Tensor]) -> None:
    """Give tensors the classes for which other threads wait, but none while another thread copies it in Python."""
    left, end = [*tensors], time.monotonic() + LONGEST_S
    while left:
        time.sleep(_PAUSE_S)  # who has just got the interpreter's lock has it for some milliseconds
        copied = _copied_elsewhere() if time.monotonic() < end else set()
        for tensor in left:
            if id(tensor) not in copied:
                tensor.__class__ = kind_of_parameter if isinstance(tensor, nn.Parameter) else kind
        left = [tensor for tensor in left if id(tensor) in copied]


def _copied_elsewhere() -> set[int]:
    """By id, what other threads are about to copy, unless they wait for the end of a trace."""
    me = threading.get_ident()
    stacks = [[*_stack(frame)] for ident, frame in sys._current_frames().items() if ident != me]
    running = (stack for stack in stacks if stack[0].f_code is not _with_values.__code__)
    return {id(frame.f_locals["self"]) for stack in running for frame in stack if frame.f_code in _COPYING}


def await_calls() -> None:
    """Wait until each other thread has left the call that it is in, or sleeps there, and runs no captured program.

    Calls that begin from now on are the caller's to stop: other threads have had their turn meanwhile.
    """
    me, end = threading.get_ident(), time.monotonic() + LONGEST_S
    native = {each.ident: each.native_id for each in threading.enumerate()}
    at = {ident: (frame, frame.f_lasti) for ident, frame in sys._current_frames().items() if ident in native}
    at.pop(me, None)
    _wait_until(lambda: not any(each in native and each != me for each in TRACING.running), end)

    def all_have_left() -> bool:
        frames = sys._current_frames()
        for ident, (frame, place) in list(at.items()):
            now = frames.get(ident)
            has_left = now is not frame or frame.f_lasti != place or not _is_awake(native[ident])
            if has_left and not any(each.f_code.co_filename.endswith(_COMPILED) for each in _stack(now)):
                del at[ident]
        return not at

    _wait_until(all_have_left, end)


def _wait_until(holds: Callable[[], bool], end: float) -> None:
    while not holds() and time.monotonic() < end:
        time.sleep(_PAUSE_S)


def _is_awake(native_id: int | None) -> bool:
    """Whether the system lets a thread run, or would if it had a processor; where it does not tell, no."""
    try:
        status = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:  # another system, or it has ended
        return False
    return status.rpartition(")")[2].split()[0] == "R"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
