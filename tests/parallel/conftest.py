import os
from pathlib import Path

import pytest
import torch.distributed

from millstream.data_parallel.board import Board, make_file
from tests.clocks import HANG_S
from tests.parallel.group import Group


def _group(size, programs, **environment):
    group = Group(size, programs=programs, **environment)
    yield group
    group.kill()


if torch.distributed.is_available() and torch.distributed.is_gloo_available():

    @pytest.fixture(scope="session")
    def pair(programs_of_this_run):
        """Two processes, kept for all tests."""
        yield from _group(2, programs_of_this_run)

    @pytest.fixture(scope="session")
    def agreeing_pair(programs_of_this_run):
        """Two processes that run a step as one program where they agree."""
        yield from _group(2, programs_of_this_run, MILLSTREAM_COLLECTIVES="captured")

    @pytest.fixture(scope="module")
    def many(programs_of_this_run):
        """Four processes, or as many as asked for, that run a step as one program where they agree."""
        yield from _group(
            int(os.environ.get("MILLSTREAM_RANKS", "4")), programs_of_this_run, MILLSTREAM_COLLECTIVES="captured"
        )

    @pytest.fixture(scope="session")
    def trio(programs_of_this_run):
        """Three processes."""
        yield from _group(3, programs_of_this_run)

    @pytest.fixture
    def own_pair(programs_of_this_run):
        """Two processes for a test that ends them."""
        yield from _group(2, programs_of_this_run)


@pytest.fixture
def boards(monkeypatch):
    """Both ends of a board, whose processes live unless they are in ``ended_processes``. Both are sure to come."""
    monkeypatch.setattr("millstream.data_parallel.board.LOOK_S", 0.0)
    path, ended = make_file(2), set()
    both = [Board(path, rank, 2, HANG_S, lambda process: process not in ended) for rank in range(2)]
    for rank, board in enumerate(both):
        board._words[4 + rank] = 1000 + rank  # they are one process here
    both[0].ended_processes = ended
    Path(path).unlink()
    return both
