"""Each idiom of ``idioms.py`` gives what eager Python gives: captured, or as the remedy of its one warning says."""

import importlib
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from millstream.capture.step.step import Step
from millstream.errors import FallbackWarning
from tests.capture.idioms import IDIOMS, World
from tests.capture.worlds import assert_same, interpret

NUM_CALLS = 3

DOCS = Path(__file__).parents[2] / "docs"


def run(make, capsys, caplog, *, is_captured):
    world = World()
    step, left = make(world)
    if is_captured:
        step = Step(step, build=interpret)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    caplog.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FallbackWarning)
        results = [step(world.x.clone()) for _ in range(NUM_CALLS)]
    state = [*world.model.parameters(), left(), capsys.readouterr().out, caplog.messages[:]]
    graphs = step.graphs if is_captured else []
    return [results, state], [each for each in told if issubclass(each.category, FallbackWarning)], graphs


def check_captured(make, capsys, caplog):
    ours, told, graphs = run(make, capsys, caplog, is_captured=True)
    theirs, _, _ = run(make, capsys, caplog, is_captured=False)
    assert not told, told[0].message
    assert graphs
    assert_same(ours, theirs)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.title)
def test_idiom_is_captured_or_its_remedy_is(idiom, capsys, caplog):
    if idiom.follow is None:
        check_captured(idiom.make, capsys, caplog)
        return
    ours, told, _ = run(idiom.make, capsys, caplog, is_captured=True)
    theirs, _, _ = run(idiom.make, capsys, caplog, is_captured=False)
    assert len(told) == 1
    assert idiom.reason in str(told[0].message)
    assert_same(ours, theirs)
    check_captured(idiom.follow, capsys, caplog)


def test_page_lists_these_idioms():
    sys.path.insert(0, str(DOCS))
    try:
        page = importlib.import_module("idioms").make_page()
    finally:
        sys.path.remove(str(DOCS))
    assert (DOCS / "idioms.md").read_text(encoding="utf-8") == page
