"""Whether engines agree is told right: also where they do not."""

import pytest
import torch
from torch import nn

from benchmarks import identity
from benchmarks.cases.models import InferenceCase, shape
from benchmarks.measuring.suite import Settings

SETTINGS = Settings(torch.device("cpu"), 1, True)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        return torch.stack([part(x) for part in self.parts]).sum(0)


CASE = InferenceCase("branches", lambda tiny: Branches(), shape(4, 8), torch.float32)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(identity, "REPLAYS", 5)
    monkeypatch.setattr(identity, "COUNTS", (1, 2))


def test_engines_that_agree():
    rows = identity.run_case(CASE, SETTINGS)
    assert [row.variant for row in rows] == ["threads, 1", "threads, 2", "threads, chosen", "threads, again and again"]
    assert all(row.equal for row in rows)
    assert rows[-1].note == "5 runs"


@pytest.fixture
def wrong_in(monkeypatch):
    """Have one run give a number that is another in its last bit."""

    def fail(which):
        run, number = identity.run, iter(range(99))

        def run_wrongly(*arguments):
            results, executable = run(*arguments)
            if next(number) == which:
                results[0][1][0] = torch.nextafter(results[0][1][0], torch.tensor(9.0))
            return results, executable

        monkeypatch.setattr(identity, "run", run_wrongly)

    return fail


def test_a_number_that_is_another_in_its_last_bit_is_found(wrong_in):
    wrong_in(4)  # the serial engine against itself, its results, one thread, and now two
    assert [row.equal for row in identity.run_case(CASE, SETTINGS)] == [True, False, True, True]


def test_a_network_that_does_not_repeat_is_compared_with_deterministic_algorithms(wrong_in, monkeypatch):
    wrong_in(1)
    lower, seen = identity.lower, []

    def note(*arguments):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return lower(*arguments)

    monkeypatch.setattr(identity, "lower", note)
    rows = identity.run_case(CASE, SETTINGS)
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(row.equal for row in rows)
    assert rows[0].note == "4 calls; deterministic algorithms, since the serial engine differs from itself without them"


def test_runs_that_differ_are_counted(monkeypatch):
    bits_of, number = identity.bits_of, iter(range(10**6))
    monkeypatch.setattr(identity, "bits_of", lambda tree: [bits + (next(number) == 3) for bits in bits_of(tree)])
    lowered, inputs = identity.lower(CASE, SETTINGS)
    with torch.no_grad():
        row = identity.replay_often(CASE.name, lowered, inputs, "threads")
    assert (row.equal, row.note) == (False, "5 runs, of which 1 differ")


def test_nothing_that_is_not_finite_passes():
    assert identity.same_bits([torch.ones(2)], [torch.ones(2)])
    assert not identity.same_bits([torch.tensor([torch.inf])], [torch.tensor([torch.inf])])
