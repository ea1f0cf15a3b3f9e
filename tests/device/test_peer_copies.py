"""Copies from device to device, by a driver that is pretended."""

import ctypes

import pytest
import torch

from millstream.device import peer_copies
from millstream.errors import DeviceError


class HostDriver:
    """Copies within the host's memory, at once."""

    def __init__(self):
        self.calls, self.status = [], 0

    def cuMemcpyAsync(self, to, source, num_bytes, stream):  # noqa: N802
        self.calls.append(("direct", stream))
        ctypes.memmove(to, source, num_bytes)
        return self.status

    def cuMemcpyPeerAsync(self, to, to_context, source, source_context, num_bytes, stream):  # noqa: N802
        self.calls.append(("by contexts", to_context, source_context, stream))
        ctypes.memmove(to, source, num_bytes)
        return self.status


@pytest.fixture
def driver(monkeypatch):
    driver = HostDriver()
    monkeypatch.setattr(peer_copies, "_driver", lambda: driver)
    monkeypatch.setattr(peer_copies, "_context", lambda index: f"context of {index}")
    return driver


class Elsewhere(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", self.index)


def on(index, tensor):
    tensor = tensor.as_subclass(Elsewhere)
    tensor.index = index
    return tensor


@pytest.mark.parametrize("direct", [True, False])
def test_devices_copy_directly_where_they_reach_each_other(driver, monkeypatch, direct):
    monkeypatch.setattr(peer_copies, "reach", lambda first, second: direct)
    to, source = on(0, torch.zeros(5)), on(1, torch.arange(5.0))
    peer_copies.copy_across(to, source, stream=7)
    assert to.tolist() == source.tolist()
    assert driver.calls == [("direct", 7) if direct else ("by contexts", "context of 0", "context of 1", 7)]


def test_what_is_empty_is_not_copied(driver):
    peer_copies.copy_across(on(0, torch.zeros(0)), on(1, torch.zeros(0)), stream=7)
    assert not driver.calls


def test_a_refusal_is_said(driver, monkeypatch):
    monkeypatch.setattr(peer_copies, "reach", lambda first, second: True)
    driver.status = 900
    with pytest.raises(DeviceError, match="refused to copy: error 900"):
        peer_copies.copy_across(on(0, torch.zeros(1)), on(1, torch.zeros(1)), stream=7)
