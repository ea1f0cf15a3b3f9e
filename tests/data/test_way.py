"""How far somebody has to go who follows one batch through the library."""

import math

import torch

from tests.file_changes import FileChanges

NUM_BATCHES = 20


def test_a_batch_changes_file_a_few_times(virtual_feed):
    """Without a thread, whose way depends on when it wakes up; as a rule, both threads of a feed take 20 together."""
    loader = [[torch.ones(8, 4), torch.ones(8)] for _ in range(4)] * 30
    fed, _ = virtual_feed(loader, 2, "eager", prefetch=False)
    changes, passing = FileChanges(), iter(fed)
    try:
        batch = [next(passing) for _ in range(40)][-1]
        fed._profiler.next_due = math.inf  # a batch that is measured goes further
        batch = next(passing)

        def run():
            nonlocal batch
            for _ in range(NUM_BATCHES):
                batch = next(passing)

        assert changes.count(run) <= 31 * NUM_BATCHES
    finally:
        changes.close()
