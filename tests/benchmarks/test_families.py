"""Suite ``families``: each side but the first is built without what it is named after."""

import torch

from benchmarks import families
from benchmarks.measuring.equality import Comparison
from benchmarks.measuring.sides import Side
from benchmarks.measuring.suite import Settings
from millstream._torch.workarounds import left_out
from millstream.kernels.registry import FAMILIES, SWITCH


def test_each_side_is_built_without_what_it_is_named_after(monkeypatch):
    built = []

    def build():
        built.append(left_out())
        return Side("ours", Comparison(True, 0.0), call=lambda: None)

    monkeypatch.setattr(families, "maker", lambda case, settings: build)
    monkeypatch.setattr(families, "compare", lambda case, mine, others, settings: (mine, *others))
    settings = Settings(torch.device("cpu"), rounds=1, tiny=True)
    names = [SWITCH, *(family.name for family in FAMILIES)]
    assert [side.name for side in families.run_case(families.CASES[0], settings)] == ["ours", *names]
    assert built == [frozenset(), *(frozenset({name}) for name in names)]
    built.clear()
    assert [side.name for side in families.run_case(families.TRAINING[0], settings)] == [
        "ours",
        "convolution-gradients",
    ]
    assert built == [frozenset(), frozenset({"convolution-gradients"})]
