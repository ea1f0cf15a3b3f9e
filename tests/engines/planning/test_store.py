"""What is kept on disk of measurements and choices."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from millstream._torch.workarounds import without
from millstream.cache import cache_folder
from millstream.cost import CostTable, KernelCost, format_table
from millstream.engine.planning import store
from millstream.engine.planning.store import Store
from millstream.kernels import registry
from millstream.schedule import Scheduling
from millstream.testing import chain_graph, towers_graph

TOWERS = towers_graph(8, 6, num_bytes=8 << 20)

COSTS = {"k1": KernelCost(1200, 0.5, 0.25), "k2": KernelCost(7)}


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")
    return torch.device("cuda:0")


@pytest.fixture
def kept(device, tmp_path):
    """A store, and its two files with something in them."""
    found = Store(device, tmp_path / "new" / "folder")
    found.save_costs(CostTable("Pretended GPU", store.versions(), COSTS))
    found.save_choice("a", {"serial_ns": 5})
    costs, choices = sorted((tmp_path / "new" / "folder").iterdir())
    return found, costs, choices


def test_costs_and_choices_add_up(kept, device):
    found, costs, choices = kept
    more = {"k2": KernelCost(8), "k3": KernelCost(9)}
    found.save_costs(CostTable("Pretended GPU", store.versions(), more))
    found.save_choice("b", {"candidates": []})
    again = Store(device, costs.parent)
    assert again.load_costs().costs == {**COSTS, **more}
    assert (again.load_choice("a"), again.load_choice("b")) == ({"serial_ns": 5}, {"candidates": []})
    assert again.load_choice("c") is None
    assert {path.name for path in costs.parent.iterdir()} == {costs.name, choices.name}  # nothing half written


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe\x00",
        b'{"format": 99, "device": "Pretended GPU", "versions": {}, "kernels": {}}',
        b'{"format": 1, "device": "Pretended GPU", "versions": {}, "kernels": {"k": [1]}}',
        b'{"format": 1, "device": "Pretended GPU", "versions": {}, "kernels": {"k": ["x", 1, 1]}}',
        b'{"a": 5}',
        b"[" * 100_000,
    ],
)
def test_spoiled_files_count_as_empty_and_are_replaced(kept, text):
    found, costs, choices = kept
    costs.write_bytes(text)
    choices.write_bytes(text)
    assert found.load_costs() == CostTable("Pretended GPU", store.versions())
    assert found.load_choice("a") is None
    found.save_costs(CostTable("Pretended GPU", store.versions(), COSTS))
    found.save_choice("a", {"serial_ns": 6})
    assert found.load_costs().costs == COSTS
    assert found.load_choice("a") == {"serial_ns": 6}


def test_where_nothing_can_be_written_nothing_is_kept_and_nothing_fails(device, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    found = Store(device, tmp_path / "file" / "cache")
    found.save_costs(CostTable("Pretended GPU", store.versions(), COSTS))
    found.save_choice("a", {})
    assert found.load_costs().costs == {}
    assert found.load_choice("a") is None


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(kept, monkeypatch):
    found, costs, choices = kept
    before = costs.read_text()

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    found.save_costs(CostTable("Pretended GPU", store.versions(), {"k9": KernelCost(1)}))
    assert costs.read_text() == before
    assert {path.name for path in costs.parent.iterdir()} == {costs.name, choices.name}


def test_another_device_or_version_starts_empty(kept, device, monkeypatch):
    found, costs, _ = kept
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    other = Store(device, costs.parent)
    assert other.load_costs() == CostTable("Another GPU", store.versions())
    assert other.load_choice("a") is None
    other.save_choice("a", {"serial_ns": 9})
    assert found.load_choice("a") == {"serial_ns": 5}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")
    monkeypatch.setattr(store, "versions", lambda: {"torch": "9.9"})
    assert Store(device, costs.parent).load_costs().costs == {}
    assert Store(device, costs.parent).load_choice("a") is None
    # A file under the right name that was measured elsewhere: copied by hand, or a digest that collides.
    costs.write_text(format_table(CostTable("Another GPU", found._versions, COSTS)))
    assert found.load_costs().costs == {}


def test_another_form_of_our_kernels_starts_empty(kept, device, monkeypatch, tmp_path):
    _, costs, _ = kept
    for name, text in (("__init__.py", ""), ("kernel.py", "one form")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(registry.kernels, "__file__", str(tmp_path / "__init__.py"))
    seen = set()
    for text in ("one form", "another", "one form"):
        (tmp_path / "kernel.py").write_text(text)
        registry._sources.cache_clear()
        seen.add(store.versions()["kernels"])
        assert Store(device, costs.parent).load_costs().costs == {}
        with without({"conv2d"}):
            assert store.versions()["kernels"] not in seen
    registry._sources.cache_clear()
    assert len(seen) == 2


def test_where_the_files_lie(monkeypatch, tmp_path):
    for name in ("MILLSTREAM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "millstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/millstream")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", "/mine")
    assert cache_folder() == Path("/mine")


def test_a_user_without_a_home_keeps_files_among_the_temporary_ones(monkeypatch, tmp_path):
    for name in ("MILLSTREAM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path / f"millstream-{os.getuid()}"


def test_the_key_of_a_choice_depends_on_what_the_choice_depends_on():
    class Program:
        def __init__(self, graph, code="code"):
            self.graph, self._code = graph, code

        def code(self, kernel):
            return self._code

    keys = {
        store.choice_key(Program(TOWERS), Scheduling()),
        store.choice_key(Program(TOWERS), Scheduling(4)),
        store.choice_key(Program(TOWERS), Scheduling(memory=1.5)),
        store.choice_key(Program(TOWERS, "other"), Scheduling()),
        store.choice_key(Program(chain_graph(3)), Scheduling()),
    }
    assert len(keys) == 5
    assert store.choice_key(Program(TOWERS), Scheduling()) in keys
