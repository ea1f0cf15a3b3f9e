"""Tensors carried by the driver: which, and that no other bytes are; with a driver that is a memmove of the host."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.cuda import batched_copy
from tests.engines.host_driver import OTHER_FORMS

pytestmark = pytest.mark.usefixtures("host_driver")


def test_tensors_are_brought_and_fetched():
    slots = [torch.zeros(3, 4), torch.zeros(2, 5, dtype=torch.int64).t(), torch.zeros(())]
    carried = batched_copy.make_batched_copy(slots)
    sources = [torch.randn(3, 4), torch.arange(10).view(2, 5).t(), torch.ones(())]
    assert carried.bring(sources)
    assert all(map(torch.equal, slots, sources))
    targets = [torch.empty_like(slot) for slot in slots]
    assert carried.fetch(targets)
    assert all(map(torch.equal, targets, sources))


@given(st.permutations([0, 1, 2]), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_every_order_of_dimensions_is_a_stretch(order, sizes):
    slot = torch.zeros(sizes).permute(order)
    assert batched_copy.make_batched_copy([slot]) is not None


@pytest.mark.parametrize(
    "slot",
    [
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(20).as_strided((3, 3), (2, 2)),
        torch.zeros(0),
        torch._neg_view(torch.zeros(4)),
        torch.zeros(4, dtype=torch.complex64).conj(),
    ],
    ids=["gaps", "repeated", "overlapping", "empty", "negated", "conjugate"],
)
def test_what_is_no_stretch_of_bytes_is_not_carried(slot):
    assert batched_copy.make_batched_copy([torch.zeros(3), slot]) is None


@pytest.mark.parametrize("source", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_a_tensor_of_another_form_is_left_to_pytorch(source, monkeypatch):
    get_device = torch.Tensor.get_device
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1 if self.is_meta else get_device(self))
    slots = [torch.zeros(2), torch.zeros(3, 4)]
    assert not batched_copy.make_batched_copy(slots).bring([torch.ones(2), source])
    assert all(not slot.any() for slot in slots)


def test_where_the_driver_refuses_it_is_said(host_driver):
    slot = torch.zeros(3)
    carried = batched_copy.make_batched_copy([slot])
    host_driver.refuses = {"copy"}
    assert not carried.bring([torch.ones(3)])
    assert not carried.fetch([torch.empty(3)])
    host_driver.refuses = set()
    assert carried.bring([torch.ones(3)])


def test_without_a_driver_there_is_none(monkeypatch):
    monkeypatch.setattr(batched_copy, "enqueuer", lambda: None)
    assert batched_copy.make_batched_copy([torch.zeros(3)]) is None
