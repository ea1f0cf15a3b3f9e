"""Steps that processes run as one program, collectives included, when all of them agree to."""

import re

from tests.parallel import checks


def test_one_program_is_bitwise_the_segments(agreeing_pair):
    for one, segments in agreeing_pair.run(checks.one_program, 20):
        assert one[0] == segments[0]
        assert one[2]
        assert one[1] <= 1
        assert segments[1:] == [20, False]


def test_step_on_a_communicator_of_its_own(agreeing_pair):
    for (on_group, counts, told), (on_own, own_counts, own_told) in agreeing_pair.run(checks.on_own_communicator):
        assert on_group == on_own
        assert counts == own_counts == [2]  # both calls on one, that in segments included
        assert told == ""
        assert own_told == "collectives on a communicator of its own of at most 4 CTAs"


def test_group_of_some_ranks_keeps_its_communicator(agreeing_pair):
    for told in agreeing_pair.run(checks.group_of_some):
        assert "not of all processes" in told


def test_ranks_differ_without_one_all_reduce(agreeing_pair):
    digests = agreeing_pair.run(checks.ranks_after, 6, 1)
    assert digests[0] != digests[1]


def test_one_program_holds_no_memory_twice(agreeing_pair):
    (found, one), (_, other) = agreeing_pair.run(checks.memory_held)
    assert one == other
    assert (found["segments"], found["collectives"]) == (0, 0)
    assert 4 * found["bucket"] < found["state"] / 2  # of many, two are allowed
    allowed = 1.05 * (found["alone"] + found["state"]) + 2 * found["bucket"]
    assert found["one program"] + found["state"] <= allowed


def test_any_schedule_keeps_collectives_in_order(agreeing_pair):
    for races, unnoticed, in_order, num_collectives, launched_after_first in agreeing_pair.run(checks.in_any_schedule):
        assert not races
        assert not unnoticed
        assert in_order
        assert launched_after_first > num_collectives > 3  # it does not wait for all gradients


def test_other_sizes_on_one_rank_are_run_in_segments(agreeing_pair):
    counts = agreeing_pair.run(checks.other_sizes_at_times, 16)
    assert counts == [3, 0]  # the other size has a graph of its own, which is not counted


def test_ranks_have_batches_of_different_sizes(agreeing_pair):
    assert agreeing_pair.run(checks.other_lengths, 16) == [1, 1]  # compiled once for all


def test_one_rank_falls_back(agreeing_pair):
    assert agreeing_pair.run(checks.fallback_on_one, 8) == [[True, 0], [False, 1]]


def test_rate_that_changes_on_one_rank_is_told_to_all(agreeing_pair):
    (told, _, *one), (same, _, *other) = agreeing_pair.run(checks.rate_changes_on_one)
    assert told == same
    assert "rank 0 has SGD.param_groups[0]['lr'] = 0.05 where rank 1 has SGD.param_groups[0]['lr'] = 0.06" in told
    assert one == other
    assert one[1]


def test_other_threshold_on_one_rank_is_told_to_all(agreeing_pair):
    (told, number), same = agreeing_pair.run(checks.clips_otherwise_on_one, 4)
    assert [told, number] == same
    assert re.search(r"rank 0 has an update of .*weight = operators \w+ .*\b0\.3\b.* where rank 1 has .*\b0\.5\b", told)
    assert number == 1  # the first runs as plain Python


def test_two_models(agreeing_pair):
    assert agreeing_pair.run(checks.two_models, 10) == [1, 1]


def test_statistics_are_those_of_all_ranks(agreeing_pair):
    (one, *ways), other = agreeing_pair.run(checks.synchronized_norms, 10)
    assert [one, *ways] == other
    assert ways == [True]


def test_rank_that_gave_its_memory_back_joins_again(agreeing_pair):
    first, second = agreeing_pair.run(checks.released_on_one, 6)
    assert first == second
    assert first[1:] == [True, 1]


def test_rank_that_cannot_capture_lets_all_go_on(agreeing_pair):
    for rank, notes in enumerate(agreeing_pair.run(checks.cannot_be_one, 4)):
        assert "rank 1 could not capture a step" in notes[0]
        assert ("no memory" in notes[0]) is (rank == 1)


def test_rank_dies(agreeing_pair):
    agreeing_pair.run(checks.begin_training)
    agreeing_pair.start_check(checks.until_another_dies)
    agreeing_pair.kill_one(1)
    (told,) = agreeing_pair.finish_check(without=(1,))
    agreeing_pair.kill()  # others begin anew
    # in the question before a step, or in an exchange
    assert re.match(r"Rank 0 waited for rank 1 \(process \d+\), which has ended|Rank 0 could not exchange", told)
    assert re.search(r"rank 1 \(process \d+\),? (which )?has ended", told)
    assert "uneven='drop'" in told
    assert "go on from a checkpoint" in told
