"""A guest leaves devices and streams as they were, on a CUDA that only writes down what is asked of it.

What it does to PyTorch's modes is tested where sources are run: see ``tests/feed/test_pace.py``.
"""

from contextlib import suppress

import pytest
import torch

from millstream._torch.thread_modes import Guest


class FakeCuda:
    """Two devices: which is current, and which stream is on each."""

    def __init__(self, monkeypatch):
        self.device, self.streams, self.calls = 0, {0: (10, 0, 1), 1: (11, 1, 1)}, []
        for name in ("_cuda_getDevice", "_cuda_setDevice", "_cuda_getCurrentStream", "_cuda_setStream"):
            monkeypatch.setattr(torch._C, name, getattr(self, name), raising=False)

    def _cuda_getDevice(self):  # noqa: N802
        return self.device

    def _cuda_getCurrentStream(self, index):  # noqa: N802
        return self.streams[index]

    def _cuda_setStream(self, stream_id, device_index, device_type):  # noqa: N802
        self.calls.append(("stream", stream_id))
        self.streams[device_index] = stream_id, device_index, device_type
        self.device = device_index

    def _cuda_setDevice(self, index):  # noqa: N802
        self.calls.append(("device", index))
        self.device = index

    @property
    def state(self):
        return self.device, dict(self.streams)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("disturbed", [(), (0,), (1,), (0, 1), (1, 0)])
def test_device_and_streams_are_afterwards_what_they_were(cuda, index, disturbed):
    before = cuda.state

    def visit():
        assert cuda.device == index
        for each in disturbed:
            if each in (0, index):  # the streams of other devices are not its own
                cuda.streams[each] = (each + 100, each, 1)
            cuda.device = each
        raise KeyError

    with suppress(KeyError):
        Guest(torch.device("cuda", index)).run(visit)
    assert cuda.state == before


def test_what_was_not_changed_is_not_set_again(cuda):
    guest = Guest(torch.device("cuda", 0))
    for _ in range(3):
        cuda.calls.clear()
        assert guest.run(lambda: "done") == "done"
    assert cuda.calls == [("device", 0)]


def test_on_the_cpu_no_device_is_asked_about(cuda):
    cuda.device = 1
    assert Guest(torch.device("cpu")).run(cuda._cuda_getDevice) == 1
    assert cuda.calls == []


@pytest.mark.parametrize("name", ["_cuda_getDevice", "_cuda_setDevice"])
def test_a_device_that_refuses_costs_nobody_his_modes(cuda, monkeypatch, name):
    def refuse(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch._C, name, refuse)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with pytest.raises(RuntimeError, match="device-side"):
            Guest(torch.device("cuda", 1)).run(lambda: None)
        assert torch.empty(1).device.type == "meta"
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
