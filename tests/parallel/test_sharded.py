"""Optimizers that are divided between two processes, against steps in which they are not."""

import pytest

from tests.parallel import sharded_checks as checks


@pytest.mark.parametrize("kind", checks.OPTIMIZERS)
def test_training_is_bitwise_as_with_whole_optimizers(pair, kind):
    (one, first), (other, second) = pair.run(checks.as_unsharded, kind, 20)
    assert one == other
    assert max(first, second) < 0.56


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_norm_of_shares_is_that_of_the_whole(pair, norm):
    (one, _), (other, _) = pair.run(checks.as_unsharded, "adamw", 20, norm)
    assert one == other


def test_compiled_step_is_bitwise_as_with_a_whole_optimizer(agreeing_pair):
    for one, segments, unsharded in agreeing_pair.run(checks.one_program, 18):
        assert one == [unsharded[0], True]
        assert segments == [unsharded[0], False]


def test_one_rank_falls_back(pair):
    (first, *one), (second, *other) = pair.run(checks.fallback_on_one, 9)
    assert first == second
    assert (one, other) == ([True, 0], [False, 1])


def test_backward_passes_are_accumulated(pair):
    first, second = pair.run(checks.accumulating, 10)
    assert first == second


def test_state_is_saved_and_loaded(pair, tmp_path):
    for rank, told in enumerate(pair.run(checks.saved_and_loaded, str(tmp_path))):
        first, plain, loaded, stepped = told
        assert f"is the shard of rank {1 - rank} of 2" in loaded
        assert "ms.full_state_dict" in loaded
        assert "is the shard of rank" in first
        assert "size" in plain
        assert "outside" in stepped.lower()


def test_optimizers_are_refused_by_name(pair):
    for one, two, own in pair.run(checks.refused):
        assert one.startswith("Rank 1: default[1] is NAdam, which shard_optimizer does not know")
        assert two.startswith("default[1] is Adafactor")
        assert own.startswith("default[1] is Own")


def test_whole_state_has_a_deadline(pair):
    first, _ = pair.run(checks.gathers_alone)
    assert "they did not in time" in first


def test_three_ranks(trio):
    results = trio.run(checks.as_unsharded, "adamw", 10)  # sums in another order
    assert len({digest for digest, _ in results}) == 1
    assert max(fraction for _, fraction in results) < 0.38


def test_distributed_checkpoint(pair, tmp_path):
    first, second = pair.run(checks.through_distributed_checkpoint, str(tmp_path))
    assert first == second


def test_every_collective_counts(pair):
    first, second = pair.run(checks.without_one, None)
    assert first == second
    for which in ("reduce", "norm", "gather"):
        assert pair.run(checks.without_one, which) != [first, first]


def test_optimizer_calls_a_closure(pair):
    pair.run(checks.with_closure, 5)
