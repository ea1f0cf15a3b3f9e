"""The checks of tests/parallel, with NCCL on all GPUs of a host where there are more than two."""

import pytest
import torch

from tests.parallel import checks, sharded_checks
from tests.parallel.group import Group

SIZE = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SIZE < 3, reason="needs three GPUs or more")]


@pytest.fixture(scope="module")
def many():
    group = Group(SIZE, "nccl")
    yield group
    group.kill()


@pytest.mark.parametrize("kind", ["sgd", "adamw", "clipping", "small buckets"])
def test_training_is_as_with_ddp(many, kind):
    assert len(set(many.run(checks.same_as_ddp, kind, 20))) == 1


def test_ranks_stay_bit_equal(many):
    assert len(set(many.run(checks.ranks_after, 1000))) == 1


def test_step_becomes_one_graph(many):
    for one, segments in many.run(checks.one_program, 20):
        assert one[0] == segments[0]
        assert one[2]
        assert not segments[2]


def test_communication_is_told_and_measured(many):
    first, *others = many.run(checks.explained, 12)
    assert first[:2] == [SIZE, True]
    assert [each[3:] for each in others] == [first[3:]] * (SIZE - 1)


def test_ranks_have_batches_of_different_sizes(many):
    many.run(checks.other_lengths, 16)


def test_one_rank_falls_back(many):
    assert many.run(checks.fallback_on_one, 8) == [[True, 0], [False, 1], *[[True, 0]] * (SIZE - 2)]


def test_sharded_training_is_as_with_whole_optimizers(many):
    found = many.run(sharded_checks.as_unsharded, "adamw", 20)
    assert len({digest for digest, _ in found}) == 1
    assert max(share for _, share in found) < 1 / SIZE + 0.1


def test_rank_that_ends_in_a_replay_is_named_by_all_others(capfd):
    group = Group(SIZE, "nccl")
    try:
        group.start_check(checks.ends_before_a_replay)
        assert group.wait_for_ends() == [1, 3, *[1] * (SIZE - 2)]
    finally:
        group.kill()
    said = capfd.readouterr().err
    for rank in set(range(SIZE)) - {1}:
        assert f"millstream: Rank {rank}: replay" in said
    assert said.count("rank 1 (process") >= SIZE - 1
