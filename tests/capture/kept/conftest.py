"""An empty cache, and what comes of looking for traces there."""

import pytest

from millstream.capture.kept.traces import Shelf
from tests.processes import bring_compiled_code


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """For each time that a trace was looked for in an empty cache, and there was one: whether it was taken."""
    bring_compiled_code(tmp_path)
    for name, value in (("WARM_START", "1"), ("TRACES", ""), ("CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(f"MILLSTREAM_{name}", value)
    (tmp_path / "traces").mkdir(mode=0o700)
    found, take = [], Shelf.take

    def note(self, *given):
        traced = take(self, *given)
        found.append(traced is not None)
        return traced

    monkeypatch.setattr(Shelf, "take", note)
    return found
