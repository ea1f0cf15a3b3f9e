"""How many files one has to open to follow one batch through the library."""

import math

import pytest
import torch

from millstream.data.transfer.to_gpu import DeviceTransfer
from tests.clocks import until
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

        assert changes.count(run) <= 24 * NUM_BATCHES
    finally:
        changes.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.ones(8, 4), torch.ones(8)],
        lambda: [torch.ones(8), (torch.ones(3), {"a": torch.ones(2)})],
        lambda: {"x": torch.ones(8), "y": [torch.ones(2)], "name": "b"},
        lambda: torch.ones(3),
    ],
    ids=["list", "nested", "dict", "tensor"],
)
def test_batches_that_look_alike_are_described_once(virtual_feed, monkeypatch, make):
    described, describe = [], DeviceTransfer._describe

    def count(transfer, batch):
        described.append(batch)
        return describe(transfer, batch)

    monkeypatch.setattr(DeviceTransfer, "_describe", count)
    fed, _ = virtual_feed([make() for _ in range(6)], 2, "eager")
    assert len(list(fed)) == 6
    assert len(described) == 1


class Inbox:
    """What the loop puts into a run's inbox, on its way there."""

    def __init__(self, inbox):
        self.inbox, self.seen = inbox, []
        self.empty, self.get = inbox.empty, inbox.get

    def put(self, message):
        self.seen.append(message)
        self.inbox.put(message)


@pytest.mark.parametrize("keeps", [True, False], ids=["held until the next", "dropped before"])
def test_next_wakes_the_thread_only_where_the_drop_of_a_batch_does_not(virtual_feed, keeps):
    fed, _ = virtual_feed([[torch.ones(8)]] * 12, 2, "eager")
    passing = iter(fed)
    batch = next(passing)
    run = passing._run
    run._inbox = inbox = Inbox(run._inbox)
    for _ in range(6):
        if not keeps:
            del batch
        until(lambda: not run._ready.empty() and run._pipeline.waits_for_memory is keeps)
        inbox.seen.clear()
        batch = next(passing)
        assert bool(inbox.seen) is not keeps
