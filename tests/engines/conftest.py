import shutil

import pytest

from millstream.device import gates, native
from millstream.engine.cuda import carrier, passage
from tests.engines.host_driver import STREAM, HostDriver


@pytest.fixture
def host_driver(monkeypatch):
    """Let the host's memory be carried as a device's is, by a driver that copies at once."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    driver, path = HostDriver(), native.build_native()
    enqueuer = native.Enqueuer(path, driver.cuMemcpyAsync, driver.cuEventRecord, driver.cuStreamWaitEvent)
    keeper = gates.Gatekeeper(path, driver)
    monkeypatch.setattr(carrier, "enqueuer", lambda: enqueuer)
    monkeypatch.setattr(passage, "gatekeeper", lambda: keeper)
    for module in (carrier, passage):
        monkeypatch.setattr(module, "current_stream_handle", lambda _: STREAM)
    monkeypatch.setattr(carrier, "_on_device", lambda _: True)
    return driver
