"""What benchmarks set for their whole process is put back after each test."""

import pytest

from millstream._torch.modes import switches


@pytest.fixture(autouse=True)
def _settings_put_back():
    before = switches.remember()
    yield
    switches.put_back(before)
