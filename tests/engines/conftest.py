import ctypes
import shutil

import pytest

from millstream.device import native
from millstream.engine import carrier

STREAM = 77
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture
def host_driver(monkeypatch):
    """Let the host's memory be carried as a device's is, by a driver that copies at once. Returns errors to come."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    errors = []

    def copy(to, source, num_bytes, stream):
        assert stream == STREAM
        if errors:
            return errors.pop()
        ctypes.memmove(to, source, num_bytes)
        return 0

    made = native.Enqueuer(native.build(native._SOURCE, *native._OPTIONS), COPY(copy), RECORD(lambda *_: 0))
    monkeypatch.setattr(carrier, "enqueuer", lambda: made)
    monkeypatch.setattr(carrier, "current_stream_handle", lambda _: STREAM)
    monkeypatch.setattr(carrier, "_on_device", lambda _: True)
    return errors
