"""The search looks into little code of a large library; what runs of it is looked at then, and guarded as usual."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise

import pytest
import torch

from millstream.capture import Step, lines
from millstream.capture.state import discover
from tests.capture.worlds import interpret

NUM_FUNCTIONS = 3 * discover.MAX_LIBRARY

MIDDLE = """
import torch
from large import last
from large.last import *

class Layer(torch.nn.Module):
    def forward(self, x):
        last.book.total += 1
        return x * last.scales["layer"] + last.table

def entry(x):
    return last.f0(x)
"""

LAST = """
import types
import torch

book, hidden, scales = types.SimpleNamespace(total=0), types.SimpleNamespace(total=0), {"layer": 1.0, "deep": 1.0}
table, deep_table = torch.zeros(2), torch.zeros(2)

def deep(x):
    hidden.total += 1
    return x * scales["deep"] + deep_table
"""


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A library whose functions name one after the other; the last of them is ``deep``."""
    folder = tmp_path / "site-packages"
    (folder / "large").mkdir(parents=True)
    names = [*(f"f{number}" for number in range(NUM_FUNCTIONS)), "deep"]
    # None calls the next one: that would be too deep for Python.
    functions = (
        f"def {name}(x):\n    return (lambda: {after}) and find('deep')(x)\n" for name, after in pairwise(names)
    )
    (folder / "large" / "__init__.py").write_text("")
    (folder / "large" / "last.py").write_text(LAST + "find = lambda name: globals()[name]\n" + "".join(functions))
    (folder / "large" / "middle.py").write_text(MIDDLE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(lines, "_SITE", (*lines._SITE, str(folder.resolve())))
    yield importlib.import_module("large.middle")
    for name in [name for name in sys.modules if name.partition(".")[0] == "large"]:
        del sys.modules[name]


def test_what_runs_of_a_large_library_is_guarded_and_little_else_is_searched(large):
    last, layer, entry = large.last, large.Layer(), large.entry

    def function(x):
        return entry(layer(x))

    found = discover.discover([("step", function)])
    assert len(found.codes) < 2 * discover.MAX_LIBRARY
    assert last.deep.__code__ not in found.codes
    step = Step(function, build=interpret, strict=True)
    for number, (last.scales["layer"], last.scales["deep"]) in enumerate(
        [(1.0, 1.0)] * 2 + [(2.0, 1.0), (2.0, 3.0)] * 2
    ):
        last.deep_table.fill_(number)
        expected = torch.ones(2) * last.scales["layer"] * last.scales["deep"] + number
        assert torch.equal(step(torch.ones(2)), expected)
        assert last.book.total == last.hidden.total == number + 1
    assert len(step.graphs) == 3
