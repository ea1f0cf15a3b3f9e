"""Leaving a source that waits for another thread, so that what comes later is not taken by a pass that is over.

In a plain loop nobody is inside the source when the loop is left. A feed's thread may be, reading ahead: in
``queue.get``, for instance, where it would take the next thing and have no use for it. Such a thread is told to leave
by a ``GeneratorExit``, as a generator is that is closed. Only where it waits in Python's own ``Condition``, as queues,
events and semaphores do: nothing is half done there, and nothing was taken.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress

_WAIT = threading.Condition.wait.__code__


def raise_exit(thread: int) -> bool:
    """Raise ``GeneratorExit`` in a thread, when it goes on, if it waits for another one; whether it does."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code is not _WAIT:
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(GeneratorExit))
    return True


def absorb_exit() -> None:
    """In the thread that was told to leave: let what has not been raised yet be raised here, and go on.

    To take it back would leave Python's signal for it set for good, in all threads: it slows them, and in Python 3.11
    one that is profiled never goes on.
    """
    with suppress(GeneratorExit):
        for _ in range(100):  # Python raises it where a loop begins anew
            pass
