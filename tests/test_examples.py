"""Every example runs, captures what it is there to show, and falls back nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
COUNT = """
import runpy, sys, warnings
from millstream import FallbackWarning
from millstream.api import executables, is_compiled
warnings.simplefilter("error", FallbackWarning)
names = runpy.run_path(sys.argv[1], run_name="__main__")
print("graphs:", sorted((name, len(executables(each))) for name, each in names.items() if is_compiled(each)))
"""


def run_example(name, *arguments, **environment):
    """Run an example in a fresh process that has no other module's compilations, and return what it printed."""
    code = COUNT.replace("sys.argv[1]", repr(str(ROOT / "examples" / f"{name}.py")))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed():
    assert sorted(GRAPHS) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", GRAPHS)
def test_example(name, tmp_path):
    resumes = name == "small_gpt"  # in a second process, which finds what the first has lowered
    own = [tmp_path] if resumes else []
    environment = {"MILLSTREAM_WARM_START": "1", "MILLSTREAM_CACHE_DIR": str(tmp_path / "cache")} if resumes else {}
    printed = run_example(name, STEPS, *own, **environment)
    assert f"graphs: {sorted(GRAPHS[name].items())}" in printed
    assert "False" not in printed, "what an example compares is equal"
    if resumes:
        assert f"saved gpt.pt after step {2 * STEPS}" in run_example(name, STEPS, *own, **environment)
