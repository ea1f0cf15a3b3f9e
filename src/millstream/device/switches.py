"""Reads PyTorch's switches in compiled code: see ``switches.cpp`` and ``millstream._torch.switches``.

Where there is no compiler, or until it is done, Python reads them.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from millstream._torch.switches import NATIVE_FILTERS, SWITCHES, accelerate
from millstream.device.native import as_builtin, load, torch_options

_SOURCE = Path(__file__).with_name("switches.cpp")


def install() -> bool:
    """Read by the compiled code from now on; whether it can be had."""
    library = load(_SOURCE, *torch_options(), "-ltorch_cpu", "-ltorch_python")
    if library is None:
        return False
    holders = tuple(part for switch in SWITCHES for holder in switch.holders for part in holder)
    accelerate(functools.partial(as_builtin(library, "millstream_read_switches"), holders, NATIVE_FILTERS))
    return True


@functools.cache
def install_later() -> None:
    """Do so in another thread, in seconds."""
    threading.Thread(target=install, name="millstream-switches", daemon=True).start()
