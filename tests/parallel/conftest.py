import pytest
import torch.distributed

from tests.parallel.group import Group


def _group(size, **environment):
    group = Group(size, **environment)
    yield group
    group.kill()


if torch.distributed.is_available() and torch.distributed.is_gloo_available():

    @pytest.fixture(scope="session")
    def pair():
        """Two processes, kept for all tests."""
        yield from _group(2)

    @pytest.fixture(scope="session")
    def agreeing_pair():
        """Two processes that run a step as one program where they agree."""
        yield from _group(2, MILLSTREAM_COLLECTIVES="captured")

    @pytest.fixture
    def trio():
        """Three processes."""
        yield from _group(3)

    @pytest.fixture
    def own_pair():
        """Two processes for a test that ends them."""
        yield from _group(2)
