"""A batch shared between processes."""

import pytest
import torch

from millstream.cli import main
from millstream.cli.training.devices import launch

SMALL = "train char-rnn --layers 1 --hidden 8 --sequence 3 --batch 8 --sample 0 --device cpu --compare 0".split()


pytestmark = pytest.mark.usefixtures("lowered_once")  # the resumed run has the first one's graph


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)


def test_two_devices_train_as_one(monkeypatch):
    """Resumed, too, from the checkpoint of one."""
    import os
    import sys

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    text = ["--text", "text"]
    assert main([*SMALL, *text, "--steps", "4", "--checkpoint", "begun.pt"]) == 0
    assert main([*SMALL, *text, "--steps", "6", "--resume", "begun.pt", "--checkpoint", "one.pt"]) == 0
    resumed = [*SMALL, *text, "--steps", "6", "--resume", "begun.pt", "--checkpoint", "two.pt", "--devices", "2"]
    monkeypatch.setenv("MILLSTREAM_WARM_START", "0")
    assert launch(resumed, 2) == 0
    one, two = torch.load("one.pt"), torch.load("two.pt")
    assert one["done"] == two["done"] == 10
    for key, value in one["model"].items():
        torch.testing.assert_close(two["model"][key], value)
    torch.testing.assert_close(two["carry"], one["carry"])


def test_device_is_named_beside_a_number_of_devices(capsys):
    assert main([*SMALL, "--devices", "2", "--device", "cuda:0"]) == 2
    assert "--device" in capsys.readouterr().err
