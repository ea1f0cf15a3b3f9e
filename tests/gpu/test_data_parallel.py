"""The checks of tests/parallel, with NCCL on two GPUs."""

import pytest
import torch

from tests.parallel import checks, fsdp_checks, sharded_checks
from tests.parallel.group import Group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def pair():
    group = Group(2, "nccl")
    yield group
    group.kill()


@pytest.mark.parametrize("kind", ["sgd", "adamw", "clipping", "accumulation", "unused", "scaler", "small buckets"])
def test_training_is_as_with_ddp(pair, kind):
    digests = pair.run(checks.same_as_ddp, kind, 20)
    assert digests[0] == digests[1]


def test_ranks_stay_bit_equal(pair):
    digests = pair.run(checks.ranks_after, 1000)
    assert digests[0] == digests[1]


def test_ranks_have_batches_of_different_sizes(pair):
    assert pair.run(checks.other_lengths, 16) == [1, 1]


def test_ragged_lengths_are_captured_once_for_all(pair):
    (one, *first), (other, *second) = pair.run(checks.ragged_lengths, 500, 30)
    assert one == other
    assert first == second == [1, 1, 499]  # the first call runs as Python


def test_one_rank_falls_back(pair):
    assert pair.run(checks.fallback_on_one, 8) == [[True, 0], [False, 1]]


def test_gradients_are_sent_off_early(pair):
    for num_cuts in pair.run(checks.overlapped, 10):
        assert num_cuts > 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compression(pair, dtype):
    pair.run(checks.compressed, 10, dtype)


def test_step_becomes_one_graph(pair):
    for one, segments in pair.run(checks.one_program, 20):
        assert one[0] == segments[0]
        assert one[2]
        assert not segments[2]


def test_communication_is_told_and_measured(pair):
    one, other = pair.run(checks.explained, 12)
    assert one[:2] == other[:2] == [2, True]
    assert one[3:] == other[3:]


def test_any_schedule_keeps_collectives_in_order(pair):
    for races, unnoticed, in_order, *_ in pair.run(checks.in_any_schedule):
        assert not races
        assert not unnoticed
        assert in_order


def test_other_sizes_on_one_rank_are_run_in_segments(pair):
    pair.run(checks.other_sizes_at_times, 16)


def test_ranks_differ_without_one_all_reduce(pair):
    digests = pair.run(checks.ranks_after, 6, 1)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_sharded_training_is_as_with_whole_optimizers(pair, kind):
    (one, first), (other, second) = pair.run(sharded_checks.as_unsharded, kind, 20)
    assert one == other
    assert max(first, second) < 0.56


def test_norm_of_shares_is_that_of_the_whole(pair):
    (one, _), (other, _) = pair.run(sharded_checks.as_unsharded, "adamw", 20, 2.0)
    assert one == other


def test_compiled_sharded_step_becomes_one_graph(pair):
    for one, segments, _ in pair.run(sharded_checks.one_program, 18):
        assert one == [segments[0], True]
        assert not segments[1]


def test_sharded_state_is_saved_and_loaded(pair, tmp_path):
    for told in pair.run(sharded_checks.saved_and_loaded, str(tmp_path)):
        assert len(told) == 4


def test_step_on_a_communicator_of_its_own(pair):
    for (on_group, _, _), (on_own, _, told) in pair.run(checks.on_own_communicator, 12):
        assert on_group == on_own
        assert told.endswith("collectives on a communicator of its own of at most 4 CTAs")


def test_rate_that_changes_on_one_rank_is_told_to_all_soon():
    group = Group(2, "nccl", MILLSTREAM_COLLECTIVES="between")
    try:
        (told, number, *_), (same, other_number, *_) = group.run(checks.rate_changes_on_one, 80)
    finally:
        group.kill()
    assert told == same
    assert number == other_number < 64 + 8
    assert "rank 0 has SGD.param_groups[0]['lr'] = 0.05 where rank 1 has" in told


def test_rank_that_ends_in_a_replay_ends_the_others(pair):
    pair.start_check(checks.ends_before_a_replay)
    assert pair.wait_for_ends() == [1, 3]
    pair.kill()


@pytest.mark.parametrize("kind", fsdp_checks.KINDS)
def test_fully_sharded_training_is_as_eager(pair, kind):
    first, second = pair.run(fsdp_checks.same_as_eager, kind, 12)
    assert first == second


def test_eager_calls_go_on_between_replays(pair):
    assert pair.run(fsdp_checks.alternating, 9) == [[1, 5]] * 2


def test_fully_sharded_step_becomes_one_graph(pair):
    assert pair.run(fsdp_checks.one_program, 18) == [[True, True, True]] * 2


def test_fully_sharded_checkpoints_are_those_of_eager_steps(pair, tmp_path):
    assert pair.run(fsdp_checks.through_checkpoint, str(tmp_path)) == [1, 1]


def test_one_of_two_sharded_ranks_is_apart(pair):
    assert pair.run(fsdp_checks.one_rank_apart, 9) == [2, 2]


def test_parameters_are_divided_without_a_wrapper(pair):
    assert pair.run(fsdp_checks.without_wrapper, 6) == [["scale", "other"]] * 2
