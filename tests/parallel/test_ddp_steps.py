"""Steps with DistributedDataParallel, captured, in two processes, against DDP's own reducer."""

import re

import pytest

from tests.parallel import checks


@pytest.mark.parametrize("kind", checks.KINDS)
def test_training_is_as_with_ddp(pair, kind):
    digests = pair.run(checks.same_as_ddp, kind, 20)
    assert digests[0] == digests[1]


def test_copies_of_state_are_of_what_was_there_before(pair):
    pair.run(checks.copies_of_state, 4)


def test_ranks_stay_bit_equal(pair):
    digests = pair.run(checks.ranks_after, 1000)
    assert digests[0] == digests[1]


def test_gradients_are_bitwise_the_mean_of_single_runs(pair):
    pair.run(checks.mean_of_two_devices)


def test_one_rank_falls_back(pair):
    assert pair.run(checks.fallback_on_one, 8) == [[True, 0], [False, 1]]


def test_settings_differ(pair):
    for told in pair.run(checks.other_settings):
        assert "Net differs between processes: rank 0 has 'ReducerSettings(" in told


def test_optimizers_differ(pair):
    for rate, kind, momentum, order in pair.run(checks.other_hyperparameters):
        assert 'rank 0 has "SGD\'s parameter group 0: lr = 0.1" where rank 1 has' in rate
        assert "lr = 0.6" in rate
        assert "optim.adamw.AdamW of 1 groups" in kind
        assert "optim.sgd.SGD of 1 groups" in kind
        assert "parameter group 1: momentum = 0.5" in momentum
        assert "parameter group 1: momentum = 0.75" in momentum
        assert "parameter group 0 with first.weight" in order
        assert "parameter group 0 with last.bias" in order


def test_rate_that_changes_on_one_rank_is_told_to_all_soon(pair):
    (told, number, one, _), (same, other_number, other, _) = pair.run(checks.rate_changes_on_one, 80)
    assert told == same
    assert number == other_number < 64 + 8
    assert "rank 0 has SGD.param_groups[0]['lr'] = 0.05 where rank 1 has SGD.param_groups[0]['lr'] = 0.06" in told
    assert one != other  # they have trained apart by then


def test_unused_parameter_is_an_error(pair):
    for told in pair.run(checks.unused_without_notice):
        assert told.startswith("spare.weight, spare.bias of Net got no gradient")


def test_parameter_is_used_by_some_ranks_in_some_steps(pair):
    for told in pair.run(checks.sometimes_unused, 12):
        assert "find_unused_parameters=True" in told


def test_two_models(pair):
    assert pair.run(checks.two_models, 10) == [1, 1]


def test_no_sync_around_steps(pair):
    pair.run(checks.no_sync_outside, 18)


def test_first_reduction_is_in_a_later_call(pair):
    one, other = pair.run(checks.reduced_in_some_calls, 6)
    assert one == other


@pytest.mark.parametrize("compresses", [False, True])
def test_wrapper_is_used_between_steps(pair, compresses):
    pair.run(checks.wrapper_between, 10, compresses)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compression(pair, dtype):
    pair.run(checks.compressed, 10, dtype)


def test_hook_of_the_users_keeps_its_reducer(pair):
    for told in pair.run(checks.own_hook, 5):
        assert len(told) == 1
        assert "communication hook hook, which is not captured" in told[0]


def test_step_within_join_is_left_to_ddp_in_all_ranks(pair):
    (one, told), (other, same) = pair.run(checks.joined, 5)
    assert one == other
    for each in (*told, *same):
        assert "DistributedDataParallel with the context manager Join, which is not captured" in each
    assert len(told) == len(same) == 1


def test_gradients_are_sent_off_early(pair):
    for num_cuts in pair.run(checks.overlapped, 10):
        assert num_cuts > 2


def test_step_without_wrapper(pair):
    digests = pair.run(checks.without_wrapper, 20)
    assert digests[0] == digests[1]


def test_models_differ(pair):
    for told in pair.run(checks.other_model):
        assert (
            "rank 0 has 'net.weight: torch.float32 [2, 4]' where rank 1 has 'net.weight: torch.float32 [3, 4]'" in told
        )


def test_each_backward_of_a_step_without_wrapper_is_reduced(pair):
    pair.run(checks.accumulating_without_wrapper)


def test_collectives_of_the_users(pair):
    for told in pair.run(checks.own_collectives, 5):
        assert "collective allgather_" in told


def test_asynchronous_collective_is_left_to_python(pair):
    (first, told), (second, _) = pair.run(checks.asynchronous_collective)
    assert first == second
    assert "all_reduce with async_op=True" in told[0]


def test_step_has_an_eager_region(pair):
    pair.run(checks.eager_region_between, 6)


def test_rank_dies(own_pair):
    own_pair.run(checks.begin_training)
    own_pair.start_check(checks.until_another_dies)
    own_pair.kill_one(1)
    (told,) = own_pair.finish_check(without=(1,))
    assert told.startswith("Rank 0 could not exchange ")
    assert re.search(r"of \d+ exchanges rank 1 \(process \d+\) has ended, after it had begun \d+\.", told)
    assert "uneven='drop'" in told
    assert "go on from a checkpoint" in told
