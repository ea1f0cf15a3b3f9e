"""Dynamo's lookup of what it has compiled, where several threads look at once.

Dynamo walks through what it has compiled for a function, checks the guards of each, and moves the one that holds to
the front. Other threads may run while it checks, so that one thread passes by what another has just moved, and
compiles it once more, which takes seconds (pytorch#118260). So do threads that wait while another one compiles what
they have looked for. Here Dynamo looks again before it compiles.

Private APIs, tried on torch 2.11 and 2.13. ``MILLSTREAM_WITHOUT=pytorch#118260`` switches it off.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from millstream._torch.compiler.dynamo import compile_lock
from millstream._torch.workarounds import Workaround

WORKAROUND = Workaround("pytorch#118260", "threads that call a model at the same time compile it again and again")

MAX_LOOKUPS = 100  # of one call, after which it compiles all the same


class _LookAgainError(Exception):
    """There is something compiled for this call. Nothing of it has run yet."""


def compile_for(
    function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool, **options: Any
) -> Callable[..., Any]:
    """``torch.compile(function, backend=backend, ...)``, which compiles nothing twice because of other threads."""
    if not WORKAROUND.applies:
        return torch.compile(function, backend=backend, fullgraph=fullgraph, **options)
    context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, **options)
    convert = getattr(context, "callback", None)
    if convert is None:  # Dynamo is switched off (TORCHDYNAMO_DISABLE)
        return context(function)  # type: ignore[no-any-return]

    def look_again_or_convert(frame: Any, entries: Any, *args: Any) -> Any:
        if not _begins_a_call(sys._getframe(1)):
            return convert(frame, entries, *args)
        with compile_lock():
            if _is_compiled(frame, backend):
                raise _LookAgainError
            return convert(frame, entries, *args)

    look_again_or_convert._torchdynamo_orig_backend = convert  # type: ignore[attr-defined] # how Dynamo finds ours
    context.callback = look_again_or_convert
    compiled = context(function)
    context.callback = convert
    at_last = context(function)
    if isinstance(function, torch.nn.Module):  # stays one, as others read its attributes
        compiled.forward = _repeated(compiled.forward, at_last.forward)
        return compiled  # type: ignore[no-any-return]
    return _repeated(compiled, at_last)


def _repeated(compiled: Callable[..., Any], at_last: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        for _ in range(MAX_LOOKUPS):
            try:
                return compiled(*args, **kwargs)
            except _LookAgainError:
                pass
        return at_last(*args, **kwargs)

    return call


def _begins_a_call(caller: FrameType | None) -> bool:
    """Return whether Dynamo itself calls what is looked up, so that nothing of the user's call has run before."""
    from torch._dynamo import eval_frame

    code = None if caller is None else caller.f_code
    return code is not None and (code.co_name, code.co_filename) == ("compile_wrapper", eval_frame.__file__)


def _is_compiled(frame: Any, backend: Callable[..., Any]) -> bool:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend

    entries = _debug_get_cache_entry_list(frame.f_code)
    own = (each for each in entries if innermost_backend(each.backend) is backend)
    return any(each.guard_manager.check(frame.f_locals) for each in own)
