import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.data.transfer.batch_layout import (
    ALIGNMENT_BYTES,
    SMALL_LEAF_BYTES,
    cut,
    describe_leaves,
    narrow_repeats,
    plan_layout,
    view_leaf,
    view_leaves,
)

DTYPES = [torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn]

leaves = st.builds(
    lambda dtype, size: torch.empty(size, dtype=dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), max_size=3),
)


def plan(*tensors):
    return plan_layout(describe_leaves(tensors))


@given(st.lists(leaves, max_size=30))
def test_leaves_lie_apart_and_aligned(tensors):
    layout = plan(*tensors)
    spans = []
    for (segment, start), spec in zip(layout.position, layout.specs, strict=True):
        whole = layout.segments[segment]
        assert start % ALIGNMENT_BYTES == 0
        assert start + spec.num_bytes <= whole.num_bytes
        spans.append((whole.start + start, whole.start + start + spec.num_bytes))
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert sum(segment.num_bytes for segment in layout.segments) == layout.num_bytes
    assert all(segment.num_bytes >= ALIGNMENT_BYTES for segment in layout.segments)
    assert all(each % ALIGNMENT_BYTES == 0 for segment in layout.segments for each in segment)


@given(st.lists(leaves, max_size=20))
def test_views_hold_what_is_written_to_them(tensors):
    layout = plan(*tensors)
    memory = torch.zeros(layout.num_bytes + 512, dtype=torch.uint8)[256:]  # not at the start of its storage
    views = view_leaves(layout, [memory[p.start : p.start + p.num_bytes] for p in layout.segments])
    for i, (view, leaf) in enumerate(zip(views, tensors, strict=True)):
        assert (view.dtype, view.size(), view.stride()) == (leaf.dtype, leaf.size(), leaf.stride())
        view.reshape(-1).view(torch.uint8).fill_(i)
    for i, view in enumerate(views):
        assert bool((view.reshape(-1).view(torch.uint8) == i).all())


@given(st.lists(leaves, max_size=20), st.integers(1, 5000))
def test_sections_have_every_byte_once(tensors, most_bytes):
    layout = plan(*tensors)
    sections = cut(layout, most_bytes)
    assert all(section.num_bytes <= -(-most_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for section in sections)
    memory = torch.arange(layout.num_bytes)
    arrived = [torch.full((segment.num_bytes,), -1) for segment in layout.segments]
    filled = [torch.full((num_bytes,), -1) for _, num_bytes in layout.sources]
    start = 0
    for section in sections:
        here = memory[start : start + section.num_bytes]
        for whole, pieces in ((arrived, section.copies), (filled, section.sources)):
            for number, first, begin, length in pieces:
                assert bool((whole[number][first : first + length] == -1).all())
                whole[number][first : first + length] = here[begin : begin + length]
        start += section.num_bytes
    assert start == layout.num_bytes
    for segment, got in zip(layout.segments, arrived, strict=True):
        assert torch.equal(got, memory[segment.start : segment.start + segment.num_bytes])
    for (i, _), got in zip(layout.sources, filled, strict=True):
        first = layout.segments[layout.position[i][0]].start + layout.position[i][1]
        assert torch.equal(got, memory[first : first + len(got)])


@given(st.lists(leaves, max_size=20))
def test_one_section_has_all_sources_in_order(tensors):
    layout = plan(*tensors)
    (section,) = cut(layout, layout.num_bytes + 1)
    assert [number for number, *_ in section.sources] == [*range(len(layout.sources))]


def test_small_leaves_share_a_segment_and_a_large_one_has_its_own():
    small, large = torch.empty(10), torch.empty(SMALL_LEAF_BYTES, dtype=torch.uint8)
    assert len(plan(small, small.clone(), large).segments) == 2
    assert len(plan(large, *[small.clone() for _ in range(500)], large.clone()).segments) == 3
    assert plan().num_bytes == 0
    assert plan().segments == ()


DENSE = {
    "contiguous": torch.empty(2, 3, 4),
    "scalar": torch.empty(()),
    "empty": torch.empty(0, 3),
    "channels last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.empty(3, 4).t(),
    "permuted": torch.empty(2, 3, 4).permute(2, 0, 1),
    "sliced": torch.empty(6, 8)[::2, 1::3],
    "conjugate": torch.empty(4, 5, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("leaf", DENSE.values(), ids=DENSE)
def test_strides_are_those_that_to_would_give(leaf):
    (spec,) = describe_leaves([leaf])
    moved = leaf.to("meta")
    assert (spec.size, spec.stride, spec.dtype) == (tuple(moved.size()), moved.stride(), moved.dtype)
    assert spec.num_bytes == leaf.numel() * leaf.element_size()
    view = view_leaf(torch.zeros(max(spec.num_bytes, 16), dtype=torch.uint8), 0, spec)
    assert torch.equal(view.copy_(torch.ones_like(leaf)), torch.ones_like(leaf))


def test_an_expanded_leaf_without_rows_takes_no_place():
    leaf = torch.ones(1, 1000).expand(1, 1000)[:0].expand(0, 1000)
    assert narrow_repeats(torch.ones(1000)[None].expand(0, 1000)).numel() == narrow_repeats(leaf).numel() == 0


def test_an_expanded_leaf_travels_without_its_repetitions():
    leaf = torch.arange(4.0).view(4, 1).expand(4, 1000)
    (spec,) = describe_leaves([leaf])
    assert (spec.size, spec.stride, spec.num_bytes) == ((4, 1000), (1, 0), 16)
    view = view_leaf(torch.zeros(16, dtype=torch.uint8), 0, spec)
    narrow_repeats(view).copy_(narrow_repeats(leaf))
    assert torch.equal(view, leaf)
    (spec,) = describe_leaves([torch.arange(12.0).view(3, 4).t()[::2].unsqueeze(1).expand(2, 5, 3)])
    assert (spec.stride[1], spec.num_bytes) == (0, 24)


def aliases(*tensors):
    return [spec.piece for spec in describe_leaves(tensors)]


def test_leaves_that_share_memory_share_it_again():
    base = torch.arange(12.0).view(3, 4)
    assert aliases(base, base) == [0, 0]
    assert aliases(base, base.t()) == [0, 0]
    assert aliases(base[:2], base[1:]) == [0, 0]
    assert aliases(base[:, :2], base[:, 2:]) == [0, 0]  # interleaved, and together all of it
    assert aliases(base[:1], base[1:]) == [0, 1]  # side by side
    assert aliases(base[::2, :1], base[1:2, :1]) == [0, 1]  # far less than what they cover
    layout = plan(base[1:], base, base.t())
    assert layout.num_bytes == ALIGNMENT_BYTES
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    part, whole, turned = view_leaves(layout, [memory])
    whole.copy_(base)
    assert torch.equal(part, base[1:])
    assert torch.equal(turned, base.t())
    ((first, num_bytes),) = layout.sources
    assert (first, num_bytes) == (1, 48)


def test_writing_into_one_leaf_does_not_touch_its_neighbours_version():
    layout = plan(*[torch.empty(4) for _ in range(3)])
    x, y, _ = view_leaves(layout, [torch.zeros(layout.num_bytes, dtype=torch.uint8)])
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()  # saves x
    y.add_(1)
    loss.backward()
    assert weight.grad is not None
