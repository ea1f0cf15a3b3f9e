import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.feed.layout import (
    ALIGNMENT_BYTES,
    MANY_SMALL_LEAVES,
    SMALL_LEAF_BYTES,
    LeafSpec,
    describe_leaf,
    plan_layout,
    view_leaf,
    view_leaves,
)

DTYPES = [torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn]

specs = st.builds(
    lambda dtype, size: LeafSpec(dtype, tuple(size), torch.empty(size, device="meta").stride()),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), max_size=3),
)


@given(st.lists(specs, max_size=40))
def test_leaves_lie_apart_and_aligned(leaves):
    layout = plan_layout(leaves)
    spans = []
    for (parcel, start), spec in zip(layout.position, leaves, strict=True):
        whole = layout.parcels[parcel]
        assert start % ALIGNMENT_BYTES == 0
        assert start + spec.num_bytes <= whole.num_bytes
        spans.append((whole.start + start, whole.start + start + spec.num_bytes))
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    ends = [parcel.start + parcel.num_bytes for parcel in layout.parcels]
    assert all(end <= layout.num_bytes for end in ends)
    assert all(parcel.start % ALIGNMENT_BYTES == 0 for parcel in layout.parcels)


@given(st.lists(specs, max_size=30))
def test_views_hold_what_is_written_to_them(leaves):
    layout = plan_layout(leaves)
    memory = torch.zeros(layout.num_bytes + 512, dtype=torch.uint8)[256:]  # not at the start of its storage
    parcels = [memory[p.start : p.start + p.num_bytes] for p in layout.parcels]
    views = view_leaves(layout, parcels)
    for i, view in enumerate(views):
        assert (view.dtype, tuple(view.size()), view.stride()) == (leaves[i].dtype, leaves[i].size, leaves[i].stride)
        view.view(torch.uint8).fill_(i) if view.dim() else view.view(1).view(torch.uint8).fill_(i)
    for i, view in enumerate(views):
        raw = view.reshape(-1).view(torch.uint8)
        assert bool((raw == i).all())


def test_a_few_leaves_have_an_allocation_each_and_many_small_ones_share():
    small, large = LeafSpec(torch.uint8, (10,), (1,)), LeafSpec(torch.uint8, (SMALL_LEAF_BYTES,), (1,))
    assert len(plan_layout([small] * 3 + [large]).parcels) == 4
    layout = plan_layout([large] + [small] * MANY_SMALL_LEAVES + [large])
    assert len(layout.parcels) == 3
    assert plan_layout([small]).parcels[0].num_bytes == 10  # exactly, so that a storage is as long as its tensor
    assert plan_layout([]).num_bytes == 0


@pytest.mark.parametrize(
    "leaf",
    [
        torch.empty(2, 3, 4),
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(3, 4).t(),
        torch.empty(2, 3, 4).permute(2, 0, 1),
        torch.empty(3, 1).expand(3, 5),
        torch.empty(6, 8)[::2, 1::3],
        torch.empty(4, 5, dtype=torch.complex64).conj(),
    ],
)
def test_strides_are_those_that_to_would_give(leaf):
    spec = describe_leaf(leaf)
    moved = leaf.to("meta")
    assert (spec.size, spec.stride, spec.dtype) == (tuple(moved.size()), moved.stride(), moved.dtype)
    view = view_leaf(torch.zeros(spec.num_bytes, dtype=torch.uint8), 0, spec)
    assert torch.equal(view.copy_(torch.ones_like(leaf)), torch.ones_like(leaf))


def test_writing_into_one_leaf_does_not_touch_its_neighbours_version():
    layout = plan_layout([LeafSpec(torch.float32, (4,), (1,))] * MANY_SMALL_LEAVES)
    x, y, *_ = view_leaves(layout, [torch.zeros(layout.num_bytes, dtype=torch.uint8)])
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()  # saves x
    y.add_(1)
    loss.backward()
    assert weight.grad is not None
