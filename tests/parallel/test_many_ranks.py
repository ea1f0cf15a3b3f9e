"""Four processes, or as many as ``MILLSTREAM_RANKS`` says (``make fuzz``: eight): means that are not exact."""

import os

import pytest

from tests.parallel import checks, sharded_checks

SIZE = int(os.environ.get("MILLSTREAM_RANKS", "4"))
in_fuzz = pytest.mark.skipif("MILLSTREAM_RANKS" not in os.environ, reason="make fuzz runs it")


def test_training_is_as_with_ddp(many):
    assert len(set(many.run(checks.same_as_ddp, "tied", 20))) == 1


def test_step_becomes_one_program_that_all_explain_and_measure_alike(many):
    first, *others = many.run(checks.explained, 6)
    assert others == [first] * (SIZE - 1)
    num_processes, is_one_graph, num_steps, collectives, _ = first
    assert (num_processes, is_one_graph) == (SIZE, True)
    assert num_steps >= 6
    assert len(collectives) > 3
    assert {operation for operation, _ in collectives} == {"broadcast", "all_reduce"}


@in_fuzz
@pytest.mark.parametrize("kind", ["sgd", "clipping", "accumulation", "unused", "small buckets"])
def test_every_kind_is_as_with_ddp(many, kind):
    assert len(set(many.run(checks.same_as_ddp, kind, 50))) == 1


@in_fuzz
def test_one_program_is_bitwise_the_segments(many):
    found = many.run(checks.one_program, 20)
    assert len({one[0] for one, _ in found} | {segments[0] for _, segments in found}) == 1


@in_fuzz
def test_ranks_stay_bit_equal(many):
    assert len(set(many.run(checks.ranks_after, 1000))) == 1


@in_fuzz
def test_ranks_have_batches_of_different_sizes(many):
    many.run(checks.other_lengths, 16)


@in_fuzz
def test_sharded_training_is_as_with_whole_optimizers(many):
    found = many.run(sharded_checks.as_unsharded, "adamw", 20)
    assert len({digest for digest, _ in found}) == 1
    assert max(share for _, share in found) < 1 / SIZE + 0.1


@in_fuzz
def test_rank_that_cannot_capture_lets_all_go_on(many):
    for notes in many.run(checks.cannot_be_one, 4):
        assert "rank 1 could not capture a step" in notes[0]
