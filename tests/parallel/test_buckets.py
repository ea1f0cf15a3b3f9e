"""Which gradients travel together."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.data_parallel.buckets import ALIGNMENT_BYTES, Member, plan_buckets

MEMBERS = st.lists(st.builds(Member, st.sampled_from("ab"), st.integers(1, 5000), st.sampled_from([2, 4])), max_size=20)


def _kinds_with_one_dtype(members):
    return [Member(f"{each.kind}{each.item_bytes}", each.num_elements, each.item_bytes) for each in members]


@given(MEMBERS, st.integers(1, 20_000), st.integers(1, 20_000))
def test_each_member_lies_in_one_bucket_apart_from_others(members, cap_bytes, last_bytes):
    members = _kinds_with_one_dtype(members)
    buckets = plan_buckets(members, cap_bytes, last_bytes)
    assert sorted(position for bucket in buckets for position in bucket.members) == [*range(len(members))]
    for bucket in buckets:
        (kind,) = {members[position].kind for position in bucket.members}
        end = 0
        for position, offset in zip(bucket.members, bucket.offsets, strict=True):
            member = members[position]
            assert member.kind == kind
            assert offset >= end
            assert offset * member.item_bytes % ALIGNMENT_BYTES == 0
            end = offset + member.num_elements
        assert end <= bucket.num_elements


@given(MEMBERS)
def test_last_parameters_travel_first(members):
    buckets = plan_buckets(_kinds_with_one_dtype(members), 8_000, 1_000)
    firsts = [min(bucket.members) for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True)
    for bucket in buckets:
        assert list(bucket.members) == sorted(bucket.members, reverse=True)


def test_bucket_of_the_first_parameters_is_small():
    members = [Member("a", 1000, 4) for _ in range(10)]
    buckets = plan_buckets(members, cap_bytes=16_000, last_bytes=1_000)
    assert [len(bucket.members) for bucket in buckets] == [1, 4, 4, 1]
    assert buckets[-1].members == (0,)
