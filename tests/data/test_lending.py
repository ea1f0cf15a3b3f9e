"""Tensors over a slot's memory that compiled code makes: the same as PyTorch's own ways make, as long as they live."""

import functools
import gc
import random
import shutil
import sys
import threading
import weakref

import pytest
import torch

from millstream import _native
from millstream.data.transfer import buffers, lent_batches
from millstream.data.transfer import to_gpu as device_transfer
from millstream.data.transfer.batch_layout import describe_leaves, plan_layout, view_leaves
from millstream.data.transfer.lent_batches import prepare_lending
from millstream.device import copying
from tests.data.test_transfer import MOODS, make_batch, settle, train

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


class Owner:
    pass


def make_leaves():
    """Small and large, without elements and without dimensions, of many types and strides, and some in one storage."""
    base = torch.arange(60_000.0).reshape(300, 200)
    return [
        torch.ones(3, 4, dtype=torch.bfloat16),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.empty(0, 3, dtype=torch.int16),
        torch.ones(5, dtype=torch.complex64),
        torch.ones(1, 4).expand(6, 4),
        torch.ones(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        base[:200],
        base[100:].t(),
    ]


def lend(leaves):
    """What is lent, what it should be, and the owners: one for each parcel."""
    layout = plan_layout(describe_leaves(leaves))
    memories = [torch.randint(0, 2, (segment.num_bytes,), dtype=torch.uint8) for segment in layout.segments]
    owners = [Owner() for _ in memories]
    lent = [None] * len(leaves)
    for each, owner, memory in zip(prepare_lending(layout, memories), owners, memories, strict=True):
        owner.memory = memory
        each(owner, lent)
    return lent, view_leaves(layout, memories), owners


def test_they_are_what_views_of_the_memory_are():
    lent, expected, _ = lend(make_leaves())
    for a, b in zip(lent, expected, strict=True):
        assert type(a) is torch.Tensor
        assert (a.dtype, a.device, a.layout) == (b.dtype, b.device, b.layout)
        assert (a.size(), a.stride(), a.storage_offset()) == (b.size(), b.stride(), b.storage_offset())
        assert a.data_ptr() == b.data_ptr() or not a.numel()
        assert (a.requires_grad, a.is_leaf, a.is_inference(), a._is_view()) == (False, True, False, False)
        assert torch._C._dispatch_keys(a) == torch._C._dispatch_keys(b)
        assert a.tolist() == b.tolist()
    # Those of one parcel share a storage, as PyTorch asks where it must know of tensors that share memory.
    assert lent[-1].untyped_storage()._cdata == lent[-2].untyped_storage()._cdata
    assert lent[0].untyped_storage()._cdata == lent[1].untyped_storage()._cdata != lent[-1].untyped_storage()._cdata


def test_a_storage_ends_with_its_last_leaf():
    """Whoever saves a leaf that is alone does not save what it was rounded up to."""
    (lent,), _, _ = lend([torch.ones(70_001, dtype=torch.uint8)])
    assert lent.untyped_storage().nbytes() == 70_001


def test_they_are_written_to_apart_and_trained_with():
    (a, b, c), _, _ = lend([torch.ones(4), torch.ones(4), torch.ones(4)])
    a.fill_(1.0), b.fill_(2.0), c.fill_(3.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (a * weight).sum()
    b.add_(1)  # no version of its neighbours'
    assert (a._version, b._version) == (1, 2)
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(4))
    assert c.requires_grad_().sum().grad_fn is not None


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_the_owner_goes_with_the_last_of_a_parcel(where):
    lent, _, owners = lend([torch.ones(10), torch.ones(20), torch.ones(100_000)])
    gone = [weakref.ref(owner) for owner in owners]
    del owners
    small, large = gone
    graph = (lent[2] * torch.ones(100_000, requires_grad=True)).sum()
    view = lent[1][3:]

    def drop(number):
        lent[number] = None

    for number, is_here in enumerate(((True, True), (True, True), (True, True))):
        thread = threading.Thread(target=drop, args=(number,))
        thread.start() if where != "here" else drop(number)
        thread.join() if where != "here" else None
        assert (small() is not None, large() is not None) == is_here
    del view
    assert (small() is None, large() is None) == (True, False)
    del graph
    assert large() is None


def test_nothing_of_the_memory_is_kept_alive_between_batches():
    layout, memory = plan_layout(describe_leaves([torch.ones(10)])), torch.zeros(256, dtype=torch.uint8)
    gone = weakref.ref(memory)
    (each,) = prepare_lending(layout, [memory])
    del memory
    assert gone() is None
    del each
    gc.collect()


def test_what_has_no_place_is_an_error_and_keeps_nothing():
    layout, memory = plan_layout(describe_leaves([torch.ones(10)] * 2)), torch.zeros(512, dtype=torch.uint8)
    (each,) = prepare_lending(layout, [memory])
    owner = Owner()
    for leaves in ([None], "no list"):
        with pytest.raises((IndexError, SystemError)):
            each(owner, leaves)
    gone = weakref.ref(owner)
    num_references = sys.getrefcount(owner)
    del owner, leaves
    assert num_references == 2
    assert gone() is None


def test_all_is_compiled_before_the_first_batch(virtual_feed, monkeypatch):
    """Compiling takes seconds, once on a machine; for the third batch the device would wait, and the ledger tell so."""
    load, loaded = _native.load.__wrapped__, []
    monkeypatch.setattr(_native, "load", functools.cache(lambda name: loaded.append(name) or load(name)))
    for each in (device_transfer._compile, copying.filler):
        each.cache_clear()
    fed, device = virtual_feed([make_batch(i, 3, 300) for i in range(10)], 2, "eager")
    with device.on(device.default):
        passing = iter(fed)
        next(passing)
        assert set(loaded) == {"core", "tensors"}
        loaded.clear()
        assert len(list(passing)) == 9
    assert loaded == []
    settle(device)


def test_batches_arrive_without_compiled_code(virtual_feed, monkeypatch):
    monkeypatch.setattr(_native, "load", lambda name: None)
    assert prepare_lending(plan_layout(()), []) == ()
    for mood in MOODS:
        batches = [make_batch(i, 3, 300) for i in range(10)]
        fed, device = virtual_feed(batches, 2, mood)
        assert train(fed, device, batches, random.Random(0))
        settle(device)


def test_who_is_lent_memory_that_nobody_owns_is_caught(virtual_feed, monkeypatch):
    """The test of the tests: leaves that do not keep what brings their slot back read the next batch."""
    prepare = lent_batches.prepare_lending

    def prepare_badly(layout, memories):
        def lend_badly(each):
            return lambda owner, leaves: each(Owner(), leaves)

        return [lend_badly(each) for each in prepare(layout, memories)]

    monkeypatch.setattr(buffers, "prepare_lending", prepare_badly)
    outcomes = []
    for seed in range(10):
        batches = [make_batch(i, 3, 300) for i in range(20)]
        fed, device = virtual_feed(batches, 2, random.Random(seed).choice(MOODS), seed)
        outcomes.append(train(fed, device, batches, random.Random(seed), keep=0.1))
        settle(device)
    assert not all(outcomes)


def test_nothing_is_prepared_for_batches_of_which_each_is_of_another_form(virtual_feed, monkeypatch):
    """Of hundreds of leaves it takes longer than to make them once in PyTorch's own ways."""
    prepared = []
    prepare = lent_batches.prepare_lending
    monkeypatch.setattr(buffers, "prepare_lending", lambda *arguments: prepared.append(1) or prepare(*arguments))
    for sizes, most in (([64 + i for i in range(12)], 0), ([64] * 12, 2)):
        batches = [make_batch(i, 2, size) for i, size in enumerate(sizes)]
        fed, device = virtual_feed(batches, 2, "eager")
        assert train(fed, device, batches, random.Random(0), keep=0.0)
        settle(device)
        assert len(prepared) == most  # once for each slot
