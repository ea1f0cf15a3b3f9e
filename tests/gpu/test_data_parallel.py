"""The checks of tests/parallel, with NCCL on two GPUs. Not run so far: no machine with two was there."""

import pytest
import torch

from tests.parallel import checks
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
    assert pair.run(checks.other_lengths, 16) == [3, 3]


def test_one_rank_falls_back(pair):
    assert pair.run(checks.fallback_on_one, 8) == [[True, 0], [False, 1]]


def test_gradients_are_sent_off_early(pair):
    for num_cuts in pair.run(checks.overlapped, 10):
        assert num_cuts > 2


def test_compression(pair):
    pair.run(checks.compressed, 10)
