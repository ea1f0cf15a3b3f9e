"""A program on disk serves exactly what it was lowered for: found by the same step, missed by any other."""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import millstream as ms
import millstream.lower.compile as compiling
from millstream import cache
from millstream.lower.kept import key


class LoweredAnewError(ms.MillstreamError):
    """Raised instead of lowering."""


class Net(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.last = last

    def forward(self, x, y):
        return torch.relu(self.linear(x)) * torch.tensor([1.0, self.last]) + y


def make_step(*, last=2.0, compiled=True, **settings):
    """A training step of a network that is the same each time, and the network."""
    torch.manual_seed(0)
    model = Net(last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def train(x, y):
        loss = (model(x, y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return (ms.step(train, strict=True, **settings) if compiled else train), model


def take_steps(*, inputs=None, **settings):
    """Train, and return the losses and the weights."""
    step, model = make_step(**settings)
    inputs = inputs or (torch.ones(4, 3), torch.ones(4, 2))
    return torch.stack([step(*inputs).detach() for _ in range(3)]), model.linear.weight.detach().clone()


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def lowered_anew():
    return pytest.raises(ms.CaptureError, match="not found")


def refuse(*_, **__):
    raise LoweredAnewError("not found")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache with the program of the step as it is, and what it returned."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE_DIR", str(folder))
        patch.setenv("MILLSTREAM_WARM_START", "1")
        return folder, take_steps()


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")


@pytest.fixture
def folder(kept, tmp_path, monkeypatch):
    """A copy of that cache, to be changed; lowering is refused."""
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another each time")
    monkeypatch.setattr(compiling, "compile_fx", refuse)
    shutil.copytree(kept[0], tmp_path / "cache")
    return tmp_path / "cache" / "programs"


def test_same_step_is_found_before_autograd(kept, folder):
    assert same(take_steps(), kept[1])
    expected = take_steps(compiled=False)
    assert all(map(torch.allclose, kept[1], expected))


def test_found_kernels_name_their_lines(folder, caplog):
    step, _ = make_step()
    caplog.set_level(logging.INFO, "millstream")
    for _ in range(2):
        step(torch.ones(4, 3), torch.ones(4, 2))
    sources = {kernel.source for kernel in ms.explain(step).programs[0].plan.graph.kernels}
    line = make_step.__code__.co_firstlineno + 7
    assert any(source.endswith(f"test_kept.py:{line} in train") for source in sources), sources
    told = [record.getMessage() for record in caplog.records if "captured in" not in record.getMessage()]
    assert told == [f"train: {phase}" for phase in ("tracing", "looking on disk", "first run")]


def overlapping():
    whole = torch.ones(20)
    return whole[:12].view(4, 3), whole[12:].view(4, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"last": 2.0000002},  # the last bit of a constant
        {"inputs": overlapping()},
        {"inputs": (torch.ones(5, 3), torch.ones(5, 2))},
        {"inputs": (torch.ones(3, 4).t(), torch.ones(4, 2))},
        {"inputs": (torch.ones(4, 3), torch.ones(4, 2, dtype=torch.float64))},
        {"options": {"max_fusion_size": 7}},
        {"options": {"post_grad_custom_post_pass": lambda graph: None}},
    ],
    ids=["constant", "aliasing", "shape", "strides", "dtype", "option", "pass"],
)
def test_another_program_is_missed(folder, changed):
    with lowered_anew():
        take_steps(**changed)


@pytest.fixture(params=["source", "version", "variable", "switch", "precision", "threads", "workaround"])
def another_world(request, monkeypatch):
    key._machine.cache_clear()
    threads = torch.get_num_threads()
    if request.param == "source":
        monkeypatch.setattr(key, "sources_digest", lambda: "of another line")
    elif request.param == "version":
        monkeypatch.setattr(torch.version, "git_version", "another")
    elif request.param == "variable":
        monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    elif request.param == "switch":
        torch.use_deterministic_algorithms(True)
    elif request.param == "precision":
        torch.set_float32_matmul_precision("high")
    elif request.param == "threads":
        torch.set_num_threads(threads + 1)
    else:
        monkeypatch.setenv("MILLSTREAM_WITHOUT", "pytorch#185873")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    key._machine.cache_clear()


def test_another_world_is_missed(folder, another_world):
    with lowered_anew():
        take_steps()


def test_source_digest_sees_one_byte(tmp_path):
    (tmp_path / "code.py").write_text("a = 1\n")
    before = key.sources_digest(tmp_path)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert key.sources_digest(tmp_path) != before


def with_digest(content):
    data = zlib.compress(json.dumps(content).encode())
    return hashlib.sha256(data).digest() + data


SPOILED = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "one byte": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "no program": lambda _: with_digest({}),
    "no data": lambda _: with_digest({"program": ["Program", {}], "sources": ["", [], [], []], "strides": ["list"]}),
    "itself": lambda _: with_digest({"record": "0" * 64, "lines": [], "attributes": {}}),
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_file_is_missed(folder, how):
    for file in folder.iterdir():
        file.write_bytes(SPOILED[how](file.read_bytes()))
    with lowered_anew():
        take_steps()


@pytest.mark.parametrize("whose", ["file", "folder", "link"])
def test_what_others_can_write_is_not_read(folder, whose):
    if whose == "file":
        for file in folder.iterdir():
            file.chmod(0o620)
    elif whose == "folder":
        folder.chmod(0o777)
    else:
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
    with lowered_anew():
        take_steps()


def test_switched_off_nothing_is_found(folder, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "0")
    with lowered_anew():
        take_steps()


def test_full_disk_costs_only_time(kept, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "replace", fail)
    assert same(take_steps(), kept[1])
    assert not cache.list_files()


def test_model_is_found_forward_and_backward(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))

    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(2.0)
        result = ms.compile(model, strict=True)(torch.ones(4, 3), torch.ones(4, 2))
        result.sum().backward()
        return result.detach(), model.linear.weight.grad

    first = run()
    monkeypatch.setattr(compiling, "compile_fx_inner", refuse)
    assert same(run(), first)


SCRIPT = """
import sys
import torch
import millstream.lower.compile as compiling
sys.path.insert(0, sys.argv[1])
from test_kept import take_steps, refuse
compiling.compile_fx = refuse
print(*(part.sum().item().hex() for part in take_steps()))
"""


def test_another_process_finds_it(kept):
    environment = {**os.environ, "MILLSTREAM_CACHE_DIR": str(kept[0]), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.split() == [part.sum().item().hex() for part in kept[1]]
