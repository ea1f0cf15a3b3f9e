"""``millstream simulate``: its tables, from files and from scripts."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from millstream.cli.command import main
from millstream.cost import Costs, KernelCost
from millstream.report import CommunicationReport, Explanation
from millstream.simulate import plan_beside
from millstream.testing import data_parallel_graph

GOLDEN = Path(__file__).parents[1] / "golden" / "simulate.txt"
SWEEP = Path(__file__).parents[2] / "benchmarks" / "results" / "collectives.json"


@pytest.fixture
def saved(tmp_path):
    """A step of ten layers, 30 ms, 500 MB in four buckets: as a small language model has it on one GPU."""
    graph = data_parallel_graph([50_000_000] * 10, 4)
    costs = Costs(tuple(KernelCost(30_000_000 // 33, 0.0, 0.5) for _ in graph.kernels), 400)
    path = tmp_path / "step.json"
    Explanation("step", (), (), (CommunicationReport(plan_beside(graph), costs, 2),)).save(path)
    return str(path)


def test_table_and_assumptions(saved, capsys):
    assert main(["simulate", "--devices", "1,2,8,64,512,4096", "--network", "nvlink,ib-400", saved]) == 0
    shown = capsys.readouterr().out
    if os.environ.get("MILLSTREAM_GOLDEN") == "write":
        GOLDEN.write_text(shown, encoding="utf-8")
    assert shown == GOLDEN.read_text(encoding="utf-8")


def test_data_for_programs(saved, capsys):
    assert main(["simulate", "--devices", "2,8", "--json", saved]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in report["rows"]] == [2, 8]
    assert [row["verified"] for row in report["rows"]] == [True, False]
    assert all(0 < row["segments_efficiency"] <= row["efficiency"] <= 1 for row in report["rows"])


def test_a_sweep_takes_the_place_of_the_link(saved, capsys):
    assert main(["simulate", "--devices", "2", "--fit", str(SWEEP), saved]) == 0
    assert "fitted to collectives.json" in capsys.readouterr().out


SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import millstream as ms

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 8 and sys.argv[1:] == ["--width", "16"]
model = DistributedDataParallel(nn.Linear(16, 4), bucket_cap_mb=0.0001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@ms.step
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range(3):
    train_step(torch.ones(2, 16))
dist.destroy_process_group()
"""


def test_a_script_runs_among_processes_that_are_made_up(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("RANK", "untouched")
    arguments = ["--devices", "8,64", "--network", "nvlink,ib-400", str(script), "--width", "16"]
    assert main(["simulate", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "train_step.step on nvlink,ib-400" in shown
    assert "in 2 collectives" in shown
    assert os.environ["RANK"] == "untouched"
    assert "MASTER_PORT" not in os.environ
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "cannot read nowhere.json"),
        (["nowhere.py"], "cannot read nowhere.py"),
        ([], "say what to simulate"),
        (["--devices", "64", "x.json"], "64 devices are more than one host of 8"),
        (["--network", "string", "x.json"], "no link is called 'string'"),
        (["--fit", "nowhere.json", "x.json"], "cannot fit a link to nowhere.json"),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["0", "x", "", "8,-1"])
def test_numbers_of_devices_are_checked(counts, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--devices", counts, "x.json"])
    assert "no numbers of devices" in capsys.readouterr().err


def test_a_script_without_such_a_step_is_refused(tmp_path, capsys):
    script = tmp_path / "empty.py"
    script.write_text("x = 1\n")
    assert main(["simulate", str(script)]) == 2
    assert "is a step that exchanges something" in capsys.readouterr().err


PLACED = """
import sys

import torch
from torch import nn

import millstream as ms

assert sys.argv[1:] == ["--width", "16"]
towers = nn.ModuleList([nn.Linear(512, 512), nn.Linear(512, 512)])

@ms.compile(engine="serial")
def both(x):
    return [tower(x) for tower in towers]

with torch.no_grad():
    both(torch.ones(256, 512))
"""


def test_a_script_is_placed_as_it_is(tmp_path, capsys):
    script = tmp_path / "towers.py"
    script.write_text(PLACED)
    arguments = ["simulate", "--mode", "place", "--devices", "1,2", str(script), "--width", "16"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "both.inference placed on devices of one process: 2 kernels, calculated from bytes and operations" in shown
    assert "crosses cpu:0 → cpu:1" in shown
    assert "within" not in shown
    assert "nvlink: " in shown
    assert main([*arguments[:3], "--json", *arguments[3:]]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    one, two = report["rows"]
    assert two["run_ns"] < 0.7 * one["run_ns"]
    assert one["run_ns"] == report["one_ns"]
    assert [each["kernels"] for each in two["used"]["devices"]] == [1, 1]


def test_what_cannot_be_placed_is_refused(saved, tmp_path, capsys):
    script = tmp_path / "empty.py"
    script.write_text("x = 1\n")
    for arguments, message in (
        ([saved], "cannot be placed: give a script.py"),
        ([str(script)], "is a compiled step or model that has been called"),
        (["--devices", "9", str(script)], "9 devices are more than"),
    ):
        assert main(["simulate", "--mode", "place", *arguments]) == 2
        assert message in capsys.readouterr().err
