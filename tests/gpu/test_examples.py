"""What `make run` runs, on a GPU: one graph, and the losses of eager."""

from pathlib import Path

import pytest

from millstream.api import executables
from tests.processes import run_here

pytestmark = pytest.mark.gpu


def test_char_rnn_learns_as_eager_does(capsys):
    names = run_here(Path(__file__).parents[2] / "examples/char_rnn.py", 12)
    assert names["device"] == "cuda"
    assert len(executables(names["train_step"])) == 1
    assert capsys.readouterr().out.endswith("losses agree\n")
