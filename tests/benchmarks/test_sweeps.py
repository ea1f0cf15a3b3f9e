"""Sweeps: what is kept of them, and that their comparisons can fail."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.sweeps import opinfo, zoo
from benchmarks.sweeps.sweep import Outcome

RELEASE = ".".join(torch.__version__.split(".")[:2])


def run_sweep(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.benchmarks.pretended_sweep", "--out", str(folder), *arguments]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = (folder / f"pretended_sweep_{RELEASE}.jsonl").read_text().splitlines()
    return int(told.split()[0]), {each["case"]: each for each in map(json.loads, lines)}


def test_a_case_that_ends_its_process_is_wrong_and_the_rest_goes_on(tmp_path):
    _, results = run_sweep(tmp_path)
    assert {case: each["outcome"] for case, each in results.items()} == {
        "one": "equal",
        "dies": "wrong",
        "falls back": "fell back",
        "two": "equal",
    }
    assert results["dies"]["detail"] == "the process ended with 3: the last line"
    table = (tmp_path / f"pretended_sweep_{RELEASE}.md").read_text()
    assert "4: 2 equal, 1 wrong, 1 fell back, 0 not comparable" in table
    assert "| falls back | 1 | because / of this |" in table


def test_a_case_that_hangs_is_ended(tmp_path):
    _, results = run_sweep(tmp_path, "hangs", "one", "--limit-seconds", "1", "--jobs", "2")
    assert [each["outcome"] for each in results.values()] == ["not comparable", "equal"]
    assert results["hangs"]["detail"] == "no result within 1 s"


def test_a_sweep_whose_time_is_up_leaves_the_rest_for_later(tmp_path):
    _, results = run_sweep(tmp_path, "hangs", "one", "--budget-seconds", "1", "--jobs", "2")
    assert [*results] == ["one"]


def test_results_of_other_commits_stand_apart_in_the_table(tmp_path):
    run_sweep(tmp_path, "one", "falls back", "--commit", "first")
    run_sweep(tmp_path, "two", "--commit", "second")
    table = (tmp_path / f"pretended_sweep_{RELEASE}.md").read_text().splitlines()
    assert [line.split("commit ")[1] for line in table if "commit" in line] == [
        "first | 2: 1 equal, 0 wrong, 1 fell back, 0 not comparable |",
        "second | 1: 1 equal, 0 wrong, 0 fell back, 0 not comparable |",
    ]
    assert table[table.index("## Equal, run 2") + 2] == "two"


def test_a_sweep_taken_up_again_runs_what_has_no_result(tmp_path):
    assert run_sweep(tmp_path, "one", "falls back")[0] == 2
    assert "- **Not run yet:** 2" in (tmp_path / f"pretended_sweep_{RELEASE}.md").read_text()
    assert run_sweep(tmp_path)[0] == 2
    count, results = run_sweep(tmp_path, "--again", "fell back")
    assert count == 1
    assert len(results) == 4


X = torch.arange(6.0).reshape(2, 3)
PLANTED = {
    "a value": X + 1e-3,
    "a type": X.double(),
    "a shape": X.reshape(3, 2),
    "strides": X.T.contiguous().T,
    "no tensor": 3.0,
    "not a number": X / 0,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_result_that_differs_is_found(fault):
    with pytest.raises(opinfo.DifferentError):
        opinfo.compare([("result 0", PLANTED[fault])], [("result 0", X)], None, values=True)


def test_a_value_within_a_few_times_eagers_own_error_is_right():
    exact = X.double() + 1e-2
    opinfo.compare([("result 0", X + 3e-2)], [("result 0", X)], [("result 0", exact)], values=True)
    with pytest.raises(opinfo.DifferentError):
        opinfo.compare([("result 0", X + 1e-1)], [("result 0", X)], [("result 0", exact)], values=True)


def test_strides_of_gradients_are_free():
    opinfo.compare([("gradient 0", X.T.contiguous().T)], [("gradient 0", X)], None, values=True)


class Small(torch.nn.Module):
    def __init__(self, fault=0.0):
        super().__init__()
        self.linear, self.fault = torch.nn.Linear(3, 2), fault

    def forward(self, x):
        wrong = self.fault if torch.compiler.is_compiling() else 0.0
        return {"y": torch.tanh(self.linear(x)) + wrong}


@pytest.mark.parametrize(("fault", "outcome"), [(0.0, Outcome.EQUAL), (1e-2, Outcome.WRONG)])
def test_a_model_that_computes_something_else_when_compiled_is_wrong(fault, outcome):
    batches = [{"x": torch.randn(4, 3)} for _ in range(2)]
    assert zoo.compare_forward(Small(fault), *batches)[0] is outcome


def test_a_model_that_forgets_its_input_shows_nothing():
    model = Small()
    torch.nn.init.zeros_(model.linear.weight)
    batches = [{"x": torch.randn(4, 3)} for _ in range(2)]
    assert zoo.compare_forward(model, *batches)[0] is Outcome.NOT_COMPARABLE
