"""The guard, and what prepares a helper thread, on a CUDA that only writes down what is asked of it."""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from millstream.device import Place
from millstream.device.drivers import cuda as driver
from millstream.device.guard import guard
from millstream.errors import DeviceError


def make_driver():
    made = object.__new__(driver.CudaDriver)  # without asking for a device
    made.place = Place("cuda", 1)
    return made


class FakeCuda:
    """Two devices: which is current, and which stream is on each."""

    def __init__(self, monkeypatch):
        self.device, self.handles, self.calls = 0, {0: 10, 1: 11}, []
        for module, name in (
            *((torch.cuda, name) for name in ("current_device", "set_device")),
            *((torch.accelerator, name) for name in ("current_stream", "set_stream")),
        ):
            monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def current_device(self):
        return self.device

    def set_device(self, index):
        self.calls.append(("device", index))
        self.device = index

    def current_stream(self, index):
        return SimpleNamespace(handle=self.handles[index], device_index=index)

    def set_stream(self, stream):
        self.calls.append(("stream", stream.device_index, stream.handle))
        self.handles[stream.device_index] = stream.handle
        self.device = stream.device_index

    @property
    def state(self):
        return self.device, dict(self.handles)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("disturbed", [(), (0,), (1,), (0, 1)])
def test_device_and_streams_are_afterwards_what_they_were(cuda, index, disturbed):
    before = cuda.state
    with suppress(KeyError), guard(f"cuda:{index}") as place:
        assert (place, cuda.device) == (Place("cuda", index), index)
        for each in disturbed:
            if each in (0, index):  # the streams of other devices are not its own
                cuda.handles[each] += 100
                cuda.device = each
        raise KeyError
    assert cuda.state == before


def test_what_was_not_changed_is_not_set_again(cuda):
    for _ in range(3):
        cuda.calls.clear()
        with guard("cuda:0"):
            pass
    assert cuda.calls == [("device", 0)]


def test_a_device_that_is_not_there(cuda):
    with pytest.raises(DeviceError, match=r"no cuda:7"):
        guard(Place("cuda", 7))
    assert cuda.calls == []


def give_to_driver(monkeypatch, function):
    monkeypatch.setattr(driver, "_find", lambda _: function)
    monkeypatch.setattr(driver, "with_pointer", partial)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_mode_of_captures_is_exchanged_and_exchanged_back(cuda, monkeypatch, refuses):
    modes, mode = [], 0

    def exchange(value):
        nonlocal mode
        value.value, mode = mode, value.value
        modes.append(mode)
        return 1 if refuses else 0

    give_to_driver(monkeypatch, exchange)
    before = cuda.state
    with suppress(KeyError), make_driver().in_thread():
        assert cuda.device == 1
        raise KeyError
    assert modes == ([1] if refuses else [1, 0])
    assert cuda.state == before


def test_a_thread_that_is_interrupted_while_it_is_prepared_is_left_as_it_was(cuda, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    give_to_driver(monkeypatch, interrupt)
    before = cuda.state
    with pytest.raises(KeyboardInterrupt), make_driver().in_thread():
        pass
    assert cuda.state == before
