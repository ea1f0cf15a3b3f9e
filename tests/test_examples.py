"""Every example runs, captures what it is there to show, and falls back nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.api import executables, is_compiled
from tests.processes import bring_compiled_code, run_here

ROOT = Path(__file__).parents[1]
STEPS = 4
#: Compiled objects of each example, and how many graphs each has in the end.
GRAPHS = {
    "char_rnn": {"train_step": 1},
    "digits_cnn": {"train_step": 1},
    "gan": {"train_step": 1},
    "lora": {"pretrain_step": 1, "finetune_step": 1},
    "metrics": {"train_step": 1},
    "mixed_precision": {"train_step": 1},
    "serving": {"model": 3},
    "small_gpt": {"train_step": 1},
    "streams_copy": {},
    "streams_gates": {},
    "streams_operator": {},
    "streams_towers": {"train_step": 1},
}


def test_every_example_is_listed():
    assert sorted(GRAPHS) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", GRAPHS)
def test_example(name, tmp_path, monkeypatch, capsys):
    resumes = name == "small_gpt"
    if resumes:  # in a second process, which finds what the first has lowered
        monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
        bring_compiled_code(tmp_path / "cache")
        monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    own = [STEPS, tmp_path] if resumes else [STEPS]
    path = ROOT / "examples" / f"{name}.py"
    names = run_here(path, *own)
    assert {key: len(executables(each)) for key, each in names.items() if is_compiled(each)} == GRAPHS[name]
    assert "False" not in capsys.readouterr().out, "what an example compares is equal"
    if resumes:
        command = [sys.executable, str(path), *map(str, own)]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert "FallbackWarning" not in done.stderr
        assert f"saved gpt.pt after step {2 * STEPS}" in done.stdout
