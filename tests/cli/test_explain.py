"""The command explain on scripts: which object, whose arguments, what happens when the script ends early."""

import json
import sys

import pytest

from millstream.cli import command, main

SCRIPT = """
import sys
import torch
import millstream as ms

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))

class Trainer:
    @staticmethod
    @ms.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

if __name__ == "__main__":
    trainer = Trainer()
    step = Trainer.step
    for _ in range(2):
        step(torch.ones(3, 4))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(SCRIPT)


@pytest.mark.parametrize("target", ["run.py:step", "run.py:trainer.step", "run.py"])
def test_object_of_a_script_is_explained_and_drawn(target, tmp_path, capsys):
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    assert main(["explain", target, "--measure", "--save", "run.html", "--", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "kernels on cpu" in text
    assert "nothing ran" in text
    assert "nothing fell back" in text
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8").lower()
    assert (sys.modules["__main__"], sys.argv, sys.path) == before


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyboardInterrupt"])
def test_script_that_ends_early_is_explained(end, tmp_path, capsys):
    (tmp_path / "run.py").write_text(f"{SCRIPT}    {end}\n")
    assert main(["explain", "run.py:step", "--json", "--", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent.py:step", "cannot read absent.py: No such file"),
        ("run.py:other", "run.py has no global 'other'; compiled there: step"),
        ("run.py:trainer.other", "run.py:trainer.other: 'Trainer' object has no attribute 'other'"),
        ("other", "'other' is nothing to explain: give SCRIPT.py:OBJECT, as in train.py:train_step"),
        ("run.py:model", "Expected what ms.compile or ms.step returned, or torch.compile with our backend, got Linear"),
    ],
)
def test_wrong_target(target, message, capsys):
    assert main(["explain", target, "--", "0.1"]) == command.EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"), [("run.pdf", "ends with one of"), ("absent/run.svg", "there is no folder")]
)
def test_a_picture_that_cannot_be_saved_is_refused_before_the_script_runs(file, message, tmp_path, capsys):
    script = tmp_path / "long.py"
    script.write_text("raise AssertionError('it ran')\n", encoding="utf-8")
    for order in (
        [f"{script}:step", "--save", str(tmp_path / file)],
        ["--save", str(tmp_path / file), f"{script}:step"],
    ):
        assert main(["explain", *order]) == command.EXIT_BAD_INPUT
        assert message in capsys.readouterr().err
