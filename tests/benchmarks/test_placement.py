"""Suite ``placement``: sides are those that they are called, and a bound is a share of what one device takes."""

import pytest
import torch

from benchmarks import placement
from benchmarks.cases.models import InferenceCase, TrainingCase, labelled, shape
from benchmarks.cases.networks import mlp
from benchmarks.cases.placed import PLACED, DistillationCase, PlacedCase
from benchmarks.measuring.suite import Settings

SETTINGS = Settings(torch.device("cpu"), 2, True)


def small_mlp(small):
    return mlp([32] * 6 + [10])


def test_what_has_a_bound_runs_on_two_devices():
    batch = labelled(shape(256, 32), 10)
    case = TrainingCase("mlp", small_mlp, batch, torch.optim.SGD, {"lr": 0.1}, autocast=None)
    (row,) = placement.run_case(PlacedCase(case, share=0.75), SETTINGS)
    assert (row.variant, row.baseline, row.equal) == ("call", "one device", True)
    assert row.ratio == row.baseline_ms / row.ours_ms
    assert "cpu:1: " in row.note
    assert "crosses cpu:0 → cpu:1: " in row.note
    assert row.note.endswith("the bits of one device")


def test_a_model_that_stays_on_one_device_says_so():
    (row,) = placement.run_case(PlacedCase(InferenceCase("mlp", small_mlp, shape(4, 32), torch.float32)), SETTINGS)
    assert row.equal
    assert row.note.startswith("one device; ")


def test_what_never_settles_is_no_side(monkeypatch):
    monkeypatch.setattr("millstream.api.executables", lambda compiled: [])
    with pytest.raises(RuntimeError, match="no plan was found in 40 calls"):
        placement.until_settled(lambda x: x, (torch.ones(1),))


@pytest.mark.parametrize("case", PLACED, ids=lambda case: case.name)
def test_stand_ins_compute(case):
    problem = case.make(torch.device("cpu"), tiny=True)
    if isinstance(case.case, InferenceCase):
        assert problem.model(*problem.first).isfinite().all()
        return
    side = placement.trainee(problem)
    step = problem.make_step(side.model, side.optimizer)
    before = side.state()["parameters"]
    assert step(*problem.batches[0]).isfinite()
    changed = {name for name, value in side.state()["parameters"].items() if not torch.equal(value, before[name])}
    assert changed
    assert isinstance(case.case, DistillationCase) != (changed == before.keys())
    assert not any(name.startswith("teacher") for name in changed)
