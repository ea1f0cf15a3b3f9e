"""A feed in two processes that have other numbers of batches."""

import pytest

import millstream as ms
from tests.parallel import checks


@pytest.mark.parametrize("over_network", [False, True])
def test_batches_that_others_lack_are_dropped(pair, over_network):
    first, second = pair.run(checks.uneven_feed, "drop", over_network)
    assert first == [[[0, 1], [0, 1, 2]], [None] * 3, [], 0]
    assert second == [[[10, 11], [10, 11, 12]], [None] * 3, [], 0]


def test_last_batch_is_repeated_for_others(pair):
    first, second = pair.run(checks.uneven_feed, "pad", False)
    assert first[:2] == [[[0, 1, 2, 2, 2]] * 2, [None, None, None, 0, 0]]
    assert second[0] == [[10, 11, 12, 13, 14]] * 2


@pytest.mark.parametrize("over_network", [False, True])
def test_uneven_batches_are_an_error_in_all(pair, over_network):
    for passes, _, told, _ in pair.run(checks.uneven_feed, "error", over_network):
        assert [len(each) for each in passes] == [3, 3]
        assert len(told) == 2
        assert all(each.startswith("Rank 0 has no batch number 4, which others have") for each in told)


def test_loader_fails_in_one(pair):
    first, second = pair.run(checks.feed_that_fails_on_one)
    assert first.startswith("FeedError: The pass over the feed has ended in all processes: rank 1 could not take")
    assert second == "ValueError: the file is gone"


def test_unknown_choice():
    with pytest.raises(ms.ArgumentError, match="uneven='wait' is none of"):
        ms.feed([1], "cpu", uneven="wait")


def test_process_alone_has_all_batches():
    assert [*ms.feed([1, 2, 3], "cpu", uneven="error")] == [1, 2, 3]
