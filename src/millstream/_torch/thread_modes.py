"""A source in its consumer's thread, where it shall compute what it would in a thread of its own.

What each thread has for itself is kept apart for the two: context variables, and PyTorch's modes (gradients, inference,
autocast, and those on its two stacks, of which a default device is one). So neither does the consumer's ``no_grad``
reach the source, nor does one that a generator leaves on where it yields reach the consumer, and the generator finds it
again when it goes on. The consumer's current device and streams are restored, but not kept for the source.

Private APIs; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch

T = TypeVar("T")

_AUTOCAST = ("cuda", "cpu")

# By names of their own: they are called twice for every batch.
_has_autocast, _has_inference, _has_gradients = (
    torch._C._is_any_autocast_enabled,
    torch.is_inference_mode_enabled,
    torch.is_grad_enabled,
)
_num_functions, _num_dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

_STACKS: tuple[tuple[Callable[[], int], Callable[[], Any], Callable[[Any], None]], ...] = (
    (_num_functions, overrides._pop_mode, overrides._push_mode),
    (_num_dispatches, _python_dispatch._pop_mode, _python_dispatch._push_mode),
)


class Guest:
    """Runs a source in another's thread.

    Args:
        device: The current one meanwhile, if it is one of CUDA's.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.type == "cuda" else None
        self._modes = _NEW
        self._variables = contextvars.Context()

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` as if in the source's own thread."""
        others, streams = _take_modes(), ()
        try:
            if self._index is not None:
                streams = _take_streams(self._index)
                torch._C._cuda_setDevice(self._index)  # also where it is: a new thread has no context of CUDA's before
            # Its end puts the gradient and inference modes of its beginning in place again, and says whether there is
            # autocast, whatever became of them; nothing else sets inference mode.
            guard = torch._C._InferenceMode(self._modes.inference)
            try:
                if self._modes is not others:  # nearly always both are those of a new thread
                    _exchange_modes(others, self._modes)
                return self._variables.run(function, *arguments)
            finally:
                self._modes = _take_modes()
                del guard
        finally:
            try:
                if streams:
                    _restore_streams(streams)
            finally:
                if others is not self._modes:
                    _exchange_modes(self._modes, others)
            del function, arguments  # an error's traceback must not lead back to the error, see ``Session.next_batch``


class _Modes(NamedTuple):
    """The modes of one side; by default those of a new thread."""

    inference: bool = False
    gradients: bool = True
    autocast: tuple[tuple[bool, torch.dtype], ...] = ((False, torch.float16), (False, torch.bfloat16))
    nesting: int = 0  # of autocast, whose cache is emptied where the outermost one ends
    stacks: tuple[list[Any], ...] = ([], [])  # the innermost mode first
    default_device: Any = None  # the mode that ``torch.set_default_device`` has put on a stack


_NEW = _Modes()


def _take_modes() -> _Modes:
    """Read the thread's modes, and take those off that are put back by adding to what is there."""
    has_autocast, has_stacks = _has_autocast(), _num_functions() or _num_dispatches()
    inference, gradients = _has_inference(), _has_gradients()
    if gradients and not (inference or has_autocast or has_stacks):
        return _NEW  # nearly always
    autocast, nesting, stacks, default_device = _NEW[2:]
    if has_autocast:
        autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST)
        nesting = torch.autocast_increment_nesting() - 1
        while torch.autocast_decrement_nesting():
            pass
    if has_stacks:
        stacks = tuple([pop() for _ in range(count())] for count, pop, _ in _STACKS)
        default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return _Modes(inference, gradients, autocast, nesting, stacks, default_device)


_StreamName = tuple[int, int, int]
"""Of a stream: its number, its device and the kind of that, as PyTorch's own functions take it."""


def _take_streams(index: int) -> tuple[_StreamName, ...]:
    """The current stream of a device of CUDA, and in front of it that of the current device, if it is another.

    With ``_restore_streams`` this does what ``device.guard`` does, more quickly: it is done for every batch.
    """
    current, stream_of = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream
    return (stream_of(index),) if current == index else (stream_of(current), stream_of(index))


def _restore_streams(streams: tuple[_StreamName, ...]) -> None:
    for name in streams:
        if torch._C._cuda_getCurrentStream(name[1]) != name:
            torch._C._cuda_setStream(*name)
    # Setting a stream also makes its device current, so the device comes last.
    if torch._C._cuda_getDevice() != streams[0][1]:
        torch._C._cuda_setDevice(streams[0][1])


def _exchange_modes(old: _Modes, new: _Modes) -> None:
    """Put ``new`` in place, where ``old`` was taken. To be called only where the two differ."""
    torch._C._set_grad_enabled(new.gradients)
    if new.autocast is not old.autocast:
        for kind, (enabled, dtype) in zip(_AUTOCAST, new.autocast, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(new.nesting):
            torch.autocast_increment_nesting()
    if new.stacks is not old.stacks:
        for stack, (_, _, push) in zip(new.stacks, _STACKS, strict=True):
            for mode in reversed(stack):
                push(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = new.default_device
