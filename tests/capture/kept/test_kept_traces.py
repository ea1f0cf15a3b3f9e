"""A later process takes a trace from disk where tracing would give the same, and traces where anything differs."""

import io
import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from millstream.cache import cache_folder
from millstream.capture import Step
from millstream.capture.kept import pickling
from millstream.capture.kept.descriptions import NotKept
from millstream.capture.kept.traces import Shelf
from millstream.capture.step import step as steps
from millstream.errors import FallbackWarning
from tests.capture.guards.cells import CELLS
from tests.capture.guards.programs import Program, Site, _load, frozen
from tests.capture.kept.edits import EDITS, FILES
from tests.capture.worlds import assert_same, interpret

FEW = 40
"""Each so many cells are in every run; all of them, and all edits, in the slow ones."""


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """For each time that a trace was looked for in an empty cache, and there was one: whether it was taken."""
    for name, value in (("WARM_START", "1"), ("TRACES", "1"), ("CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(f"MILLSTREAM_{name}", value)
    (tmp_path / "traces").mkdir(mode=0o700)
    found, take = [], Shelf.take

    def note(self, *given):
        traced = take(self, *given)
        found.append(traced is not None)
        return traced

    monkeypatch.setattr(Shelf, "take", note)
    return found


def train(make, calls=4):
    """A new instance of a program as a step, beside eager: the same results and weights after each call."""
    (ours, weights), (theirs, others) = make(), make()
    step = Step(ours, build=interpret)
    for call in range(calls):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(call), dtype=weights[0].dtype)
        assert_same(step(x.clone()), theirs(x.clone()), name="result")
        for one, other in zip(weights, others, strict=True):
            assert_same(one, other, name="weight")
            assert_same(one.grad, other.grad, name="gradient")
    return step


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trainer():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(4) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, state = [], {"calls": 0, "mean": 0.0}

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        state["calls"] += 1
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.item()
        return {"loss": loss, "text": f"{state['calls']}: {loss.item():.4f}", "rate": scheduler.get_last_lr()[0]}

    return step, [*model.parameters(), *model.buffers()]


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = [each.detach().clone() for each in model.parameters()]

    def step(x, *, scale=2.0):
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average, model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return loss, x

    return step, [*model.parameters(), *average]


def refuse(*_):
    raise AssertionError("it is traced")


@pytest.mark.parametrize("make", [trainer, tied])
def test_another_instance_of_a_program_is_not_traced(make, taken, monkeypatch):
    train(make)
    assert not taken
    monkeypatch.setattr(steps, "trace_step", refuse)
    step = train(make)
    assert taken == [True]
    assert not step.refusals
    assert any("its trace was on disk" in line for line in step.history)


def test_unless_asked_to_nothing_is_kept(taken, tmp_path, monkeypatch):
    monkeypatch.delenv("MILLSTREAM_TRACES")
    train(tied)
    assert not [*(tmp_path / "traces").iterdir()]


def test_a_graph_from_disk_is_guarded_as_a_traced_one(taken):
    first, second = train(tied).graphs[0], train(tied).graphs[0]
    assert taken == [True]
    assert [str(node.meta.get("val")) for node in first.gm.graph.nodes] == [
        str(node.meta.get("val")) for node in second.gm.graph.nodes
    ]
    assert first.gm.code == second.gm.code
    for check in ("sizes", "orders", "entries", "absent", "cells", "borrowed", "forms", "contents", "dicts", "hooks"):
        names = [sorted(map(str, getattr(graph.guards, check).names)) for graph in (first, second)]
        assert names[0] == names[1], check


def test_a_file_that_is_spoiled_is_no_file(taken, tmp_path):
    train(tied)
    for path in (tmp_path / "traces").glob("*.trace"):
        path.write_bytes(path.read_bytes()[:-7])
    train(tied)
    assert not taken


def test_a_file_names_nothing_that_has_no_place_there():
    with pytest.raises(NotKept, match=r"names builtins\.eval"):
        pickling.Unpickler(io.BytesIO()).find_class("builtins", "eval")
    with pytest.raises(NotKept, match=r"names os\.system"):
        pickling.Unpickler(io.BytesIO()).find_class("os", "system")


def some(values):
    return [pytest.param(each, marks=() if not at % FEW else pytest.mark.slow) for at, each in enumerate(values)]


@pytest.mark.parametrize("cell", some(CELLS), ids=str)
def test_what_was_traced_with_other_values_is_not_taken(cell, taken):
    source = Program((Site(cell, "in the step", (1,)),)).source
    with frozen(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for is_altered in (False, True):
            make = _load(source)
            (ours, weights, told, *changes), (theirs, others, also_told, *other_changes) = make(), make()
            if is_altered:
                changes[0][0]()
                other_changes[0][0]()
            step = Step(ours, build=interpret)
            for call in range(3):
                x = torch.randn(2, 2, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
                assert_same(step(x.clone()), theirs(x.clone()), name="result")
                assert_same(weights[0], others[0], name="weight")
                assert_same(told(), also_told(), name="effect")


def run_project(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    found = subprocess.run([sys.executable, folder / "main.py"], check=False, capture_output=True, text=True)
    assert not found.returncode, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the project, which a process has run, and the cache that it has left."""
    folder, cached = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("left")
    for path in cache_folder().glob("*.so"):  # compiled code, which need not be compiled once more
        shutil.copy2(path, cached)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WARM_START", "1"), ("TRACES", "1"), ("CACHE_DIR", str(cached))):
            patch.setenv(f"MILLSTREAM_{name}", value)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        first = run_project(folder, FILES)
        assert not first["bad"]
        assert not first["taken"]
        yield folder, cached


@pytest.mark.parametrize("edit", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in EDITS)], ids=str)
def test_edits_between_processes_are_noticed(edit, project, tmp_path, monkeypatch):
    folder, cached = project
    shutil.copytree(cached, tmp_path / "cache")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    files = dict(FILES)
    if edit is not None:
        file, before, after = EDITS[edit]
        assert before in files[file]
        files[file] = files[file].replace(before, after, 1)
    second = run_project(folder, files)
    assert not second["bad"], second
    assert edit is not None or second["taken"] == [True], second
