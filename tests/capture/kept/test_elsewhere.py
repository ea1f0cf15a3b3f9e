"""``tune="background"``: another process lowers a step, and calls run as plain Python until its program is on disk."""

import copy
import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.capture.kept import elsewhere
from millstream.capture.kept.graph_data import Fakes
from tests.processes import bring_compiled_code

PATIENCE_S = 300


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    bring_compiled_code(tmp_path)
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MILLSTREAM_WARM_START", raising=False)
    monkeypatch.delenv("MILLSTREAM_TRACES", raising=False)
    monkeypatch.delenv("MILLSTREAM_TUNE", raising=False)
    monkeypatch.setattr(elsewhere._jobs, "tried", set())


def trainer(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    twin = copy.deepcopy(model)

    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            return loss

        return train_step

    return ms.step(make(model), **settings), make(twin), model, twin


def batch(rows=6):
    return torch.randn(rows, 8, dtype=torch.double), torch.randint(4, (rows,))


def calls(step, eager, number, rows=6):
    for _ in range(number):
        x, y = batch(rows)
        torch.testing.assert_close(step(x, y), eager(x, y).detach())


def until_over(step):
    deadline = time.monotonic() + PATIENCE_S
    while any(not job.is_over for job in step._jobs.values()):
        assert time.monotonic() < deadline, step.fallbacks
        time.sleep(0.05)


def refuse(*_, **__):
    raise AssertionError("this process lowers")


def test_calls_are_eager_until_another_process_has_lowered_the_step(monkeypatch):
    monkeypatch.setattr("millstream.lower.compile.compile_fx", refuse)
    step, eager, model, twin = trainer(tune="background", strict=True)
    calls(step, eager, 30)
    assert not step.graphs
    assert "another process has been compiling" in str(ms.explain(step))
    until_over(step)
    calls(step, eager, 30)
    (graph,) = step.graphs
    assert graph.num_runs >= 29
    assert not step.fallbacks
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
    assert not [*Path(elsewhere.cache_folder(), "jobs").iterdir()]


@pytest.mark.parametrize(
    ("module", "said"),
    [("no.such.module", "No module named"), ("ends", "it ended with status -9"), ("\0", "embedded null byte")],
)
def test_a_step_is_lowered_here_where_the_other_process_has_failed(monkeypatch, caplog, tmp_path, module, said):
    caplog.set_level("INFO", "millstream")
    tmp_path.joinpath("ends.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(elsewhere, "MODULE", module)
    step, eager, *_ = trainer(tune="background", strict=True)
    calls(step, eager, 3)
    assert bool(step.graphs) == (module == "\0")  # which no process can be started with
    until_over(step)
    calls(step, eager, 3)
    assert len(step.graphs) == 1
    assert "not compiled in the background: " in caplog.text
    assert said in caplog.text
    assert not [*Path(elsewhere.cache_folder(), "jobs").iterdir()]


def test_the_other_process_ends_with_its_step(monkeypatch, tmp_path):
    tmp_path.joinpath("waits_for_its_parent.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(elsewhere, "MODULE", "waits_for_its_parent")
    step, eager, *_ = trainer(tune="background", strict=True, dynamic=False)
    calls(step, eager, 2)
    (job,) = step._jobs.values()
    calls(step, eager, 2, rows=5)  # which waits for the first to end
    assert [*step._jobs.values()] == [job, job]
    assert not job.is_over
    with monkeypatch.context() as late:
        late.setattr(elsewhere, "LIMIT_S", 0.0)
        assert job.is_over
    process = job._process
    del job
    ms.precompile(step, *batch())  # asks for a graph now
    calls(step, eager, 1)
    assert len(step.graphs) == 1
    assert len(step.jobs) == 1  # for which calls of the other form still wait
    step.reset()
    gc.collect()
    assert process.poll() is not None
    assert not step.fallbacks


def test_what_parts_between_eager_regions_wait_for_is_told(monkeypatch, tmp_path):
    tmp_path.joinpath("waits_for_its_parent.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(elsewhere, "MODULE", "waits_for_its_parent")
    weight, seen = torch.ones(3, requires_grad=True), []
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @ms.step(tune="background", strict=True)
    def step(x):
        (weight * x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with ms.eager_region():
            seen.append(len(seen))
        return weight * 2

    for _ in range(3):
        step(torch.ones(3))
    assert seen == [0, 1, 2]
    assert "another process has been compiling" in str(ms.explain(step))
    step.reset()
    assert not step.jobs


@pytest.mark.parametrize(
    ("operators", "device", "cores", "free", "expected"),
    [
        (1000, "cuda", 4, 2 << 30, True),
        (999, "cuda", 4, 2 << 30, False),
        (1000, "cpu", 4, 2 << 30, False),
        (1000, "cuda", 3, 2 << 30, False),
        (1000, "cuda", 4, 1 << 30, False),
    ],
)
def test_what_takes_long_on_a_gpu_is_compiled_elsewhere_where_there_is_room(
    monkeypatch, operators, device, cores, free, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = Fakes().make((0, 4), torch.float32, torch.device(device), (1,), (1,))
    for _ in range(operators):
        node = graph.call_function(torch.neg, (node,))
    assert elsewhere.takes_long(torch.fx.GraphModule({}, graph)) == expected


def test_a_variable_overrules_when_a_step_is_compiled(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_TUNE", "first")
    monkeypatch.setattr(elsewhere, "Job", refuse)
    step, eager, *_ = trainer(tune="background", strict=True)
    calls(step, eager, 3)
    assert len(step.graphs) == 1
    monkeypatch.setenv("MILLSTREAM_TUNE", "soon")
    with pytest.raises(ms.ArgumentError, match="tune='soon' says not when"):
        trainer()


def test_no_clock_decides_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(elsewhere, "Job", refuse)
    step, eager, *_ = trainer(tune="background", strict=True, options={"reproducible": True})
    calls(step, eager, 3)
    assert len(step.graphs) == 1
