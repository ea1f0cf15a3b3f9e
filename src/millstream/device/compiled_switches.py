"""Reads PyTorch's switches in compiled code: see ``_native/switches.cpp`` and ``millstream._torch.modes.switches``.

Without it, or until it is compiled, Python reads them.
"""

from __future__ import annotations

import functools
import threading

from millstream import _native
from millstream._torch.modes.switches import NATIVE_FILTERS, SWITCHES, accelerate


def install() -> bool:
    """Read by the compiled code from now on; whether it can be had."""
    tensors = _native.load("tensors")
    if tensors is None:
        return False
    holders = tuple(part for switch in SWITCHES for holder in switch.holders for part in holder)
    accelerate(functools.partial(tensors.read_switches, holders, NATIVE_FILTERS))
    return True


@functools.cache
def install_later() -> None:
    """Do so in another thread, in seconds."""
    threading.Thread(target=install, name="millstream-switches", daemon=True).start()
