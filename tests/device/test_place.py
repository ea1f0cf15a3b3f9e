import dataclasses

import pytest
import torch

from millstream.device import Place, available_places
from millstream.errors import DeviceError


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), Place("cpu"), torch.device("cpu", 0)])
def test_the_cpu_by_any_name(device):
    assert Place.of(device) == Place("cpu", 0)
    assert str(Place.of(device)) == "cpu"


@pytest.mark.parametrize("device", ["cuda:1", 1, torch.device("cuda", 1), Place("cuda", 1)])
def test_a_gpu_by_any_name(device, two_gpus):
    place = Place.of(device)
    assert (place.kind, place.index, str(place)) == ("cuda", 1, "cuda:1")
    assert place.torch_device == torch.device("cuda:1")


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
def test_bare_cuda_is_the_current_device(device, two_gpus):
    assert Place.of(device) == Place("cuda", 1)


@pytest.mark.parametrize("device", ["cuda:7", 7, Place("cuda", 7), torch.device("cuda", 7)])
def test_an_absent_gpu_names_those_that_are_there(device, two_gpus):
    with pytest.raises(DeviceError, match=r"no cuda:7 here\. Available here: cpu, cuda:0, cuda:1"):
        Place.of(device)


def test_cuda_without_any_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"no cuda:0 here\. Available here: cpu\."):
        Place.of("cuda")


@pytest.mark.parametrize("device", ["graphics card", "cuda:-1", "", "cuda:x"])
def test_a_name_that_means_nothing(device):
    with pytest.raises(DeviceError, match="Available here: cpu"):
        Place.of(device)


@pytest.mark.parametrize("device", ["mps", "meta", torch.device("xpu", 0)])
def test_a_device_of_another_kind(device):
    with pytest.raises(DeviceError, match="does not run on"):
        Place.of(device)


@pytest.mark.parametrize("device", [-1, True, None, 1.5])
def test_what_names_no_device(device):
    with pytest.raises(DeviceError, match="named by a string"):
        Place.of(device)


@pytest.mark.parametrize(("kind", "index"), [("tpu", 0), ("cuda", -1), ("cpu", 1)])
def test_a_place_that_cannot_be(kind, index):
    with pytest.raises(DeviceError):
        Place(kind, index)


def test_a_place_is_a_frozen_sortable_key():
    assert sorted([Place("cuda", 1), Place("cpu"), Place("cuda", 0)]) == [Place("cpu"), Place("cuda"), Place("cuda", 1)]
    assert len({Place("cuda", 0), Place("cuda"), Place("cpu")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Place("cpu").index = 3


def test_available_places(two_gpus):
    assert available_places() == (Place("cpu"), Place("cuda", 0), Place("cuda", 1))
