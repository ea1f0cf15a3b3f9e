"""A program on disk serves exactly what it was lowered for: found by the same step, missed by any other."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy import functions

import millstream as ms
import millstream.lower.compile as compiling
from millstream import cache
from millstream._torch.compiler.size_expressions import decode_expression, encode_expression
from millstream._torch.workarounds import without
from millstream.lower import lower_graph
from millstream.lower.kept import key
from tests.clocks import HANG_S
from tests.processes import bring_compiled_code

compile_fx = compiling.compile_fx


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
    bring_compiled_code(folder)
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
    monkeypatch.setenv("TRITON_PTXAS_PATH", "as PyTorch sets it where Triton compiles")
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


@pytest.fixture(params=["source", "version", "variable", "switch", "precision", "newer", "threads", "workaround"])
def another_world(request, monkeypatch):
    key._describe_host.cache_clear()
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
    elif request.param == "newer":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    elif request.param == "threads":
        torch.set_num_threads(threads + 1)
    else:
        monkeypatch.setenv("MILLSTREAM_WITHOUT", "pytorch#185873")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    key._describe_host.cache_clear()


def test_another_world_is_missed(folder, another_world):
    with lowered_anew():
        take_steps()


@pytest.mark.parametrize("part", ["values", "own-kernels", "epilogues"])
def test_a_program_without_a_part_is_another_one(part):
    described = [*key.describe_settings({})]
    with without([part]):
        assert [*key.describe_settings({})] != described


def test_source_digest_sees_one_byte(tmp_path):
    (tmp_path / "code.py").write_text("a = 1\n")
    before = key.sources_digest(tmp_path)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert key.sources_digest(tmp_path) != before


# --- sizes that change -----------------------------------------------------------------------------------------------


def take_steps_of(*sizes, **settings):
    """Train on batches of so many rows by one graph for all of them, and return the losses and the weights."""
    step, model = make_step(dynamic=True, **settings)
    return take_sizes(step, *sizes), model.linear.weight.detach().clone(), len(getattr(step, "graphs", ()))


def take_sizes(step, *sizes):
    batches = torch.linspace(-1, 2, 3 * max(sizes)).view(-1, 3)
    return torch.stack([step(batches[:rows], batches[:rows, 1:] * 2).detach() for rows in sizes])


@pytest.fixture(scope="module")
def kept_for_sizes(tmp_path_factory):
    """A cache with the program of the step for any number of rows, and what it returned at some."""
    folder = tmp_path_factory.mktemp("kept")
    bring_compiled_code(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE_DIR", str(folder))
        patch.setenv("MILLSTREAM_WARM_START", "1")
        return folder, take_steps_of(6, 6, 9, 30)


@pytest.fixture
def folder_for_sizes(kept_for_sizes, tmp_path, monkeypatch):
    """A copy of that cache; lowering is refused."""
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "compile_fx", refuse)
    shutil.copytree(kept_for_sizes[0], tmp_path / "cache")
    return tmp_path / "cache" / "programs"


def rewrite(folder, change):
    """Change what the files of programs say, those that point to others left out; returns how many there were."""
    found = {file: json.loads(zlib.decompress(file.read_bytes()[32:])) for file in folder.iterdir()}
    programs = {file: content for file, content in found.items() if "record" not in content}
    for file, content in programs.items():
        file.write_bytes(with_digest({**content, **change(content)}))
    return len(programs)


def total(content):
    """The sum of all sizes: twice the rows, 3 and 2."""
    return " + ".join(f"L['t{number}']" for number in range(len(content["symbols"])))


def test_program_for_sizes_is_found_and_gives_the_same_bits(kept_for_sizes, folder_for_sizes):
    losses, weights, graphs = kept_for_sizes[1]
    assert graphs == 1
    found = take_steps_of(6, 6, 9, 30)
    assert same(found[:2], (losses, weights))
    assert found[2] == 1
    expected = take_sizes(make_step(compiled=False)[0], 6, 6, 9, 30)
    assert torch.allclose(losses, expected)


def test_program_for_sizes_is_found_at_other_sizes(folder_for_sizes):
    expected = take_sizes(make_step(compiled=False)[0], 40, 40, 7)
    assert torch.allclose(take_steps_of(40, 40, 7)[0], expected)


@pytest.mark.parametrize(
    "changed", [{"last": 2.0000002}, {"options": {"max_fusion_size": 7}}], ids=["constant", "option"]
)
def test_another_program_for_sizes_is_missed(folder_for_sizes, changed):
    with lowered_anew():
        take_steps_of(6, 6, **changed)


def test_what_was_decided_about_sizes_is_checked_on_load(folder_for_sizes):
    rewrite(folder_for_sizes, lambda content: {"guards": f"{content['guards']} and {total(content)} <= 25"})
    with lowered_anew():
        take_steps_of(20, 20)


def test_what_was_decided_about_sizes_is_checked_in_each_call(folder_for_sizes):
    rewrite(folder_for_sizes, lambda content: {"guards": f"{content['guards']} and {total(content)} <= 25"})
    step, _ = make_step(dynamic=True)
    take_sizes(step, 6, 6, 10, 9)
    with lowered_anew():
        take_sizes(step, 11)


@pytest.mark.parametrize("change", [{"symbols": ["s999"]}, {"guards": "L['t7'] > 1"}], ids=["symbols", "guards"])
def test_a_program_of_other_symbols_is_missed(folder_for_sizes, change):
    rewrite(folder_for_sizes, lambda content: change)
    with lowered_anew():
        take_steps_of(6, 6)


def test_where_other_things_were_decided_both_programs_are_kept(folder_for_sizes, monkeypatch):
    rewrite(folder_for_sizes, lambda content: {"guards": f"{total(content)} > 200"})
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "compile_fx", compile_fx)
        take_steps_of(6, 6)
    assert rewrite(folder_for_sizes, lambda content: {}) == 2
    take_steps_of(6, 6)
    take_steps_of(200, 200)


S, T = sympy.symbols("s1 s2", integer=True, positive=True)
EXPRESSIONS = [
    8 * S + T * (S - 1) ** 2,
    functions.FloorDiv(S + 7, 8),
    functions.ModularIndexing(S, 4, T),
    functions.PythonMod(S - 9, 4),
    functions.Max(1, S - T),
    functions.Min(S, T),
    functions.CeilToInt(functions.IntTrueDiv(S, 3)),
    functions.ToFloat(S) * 0.125,
    sympy.Rational(1, 2) * S,
    sympy.And(S > 3, sympy.Eq(T, 2 * S)),
]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_expressions_are_read_as_they_were_written(expression):
    data = json.loads(json.dumps(encode_expression(expression)))
    read = decode_expression(data, {"s1": S, "s2": T})
    assert read == expression
    assert read.free_symbols <= {S, T}


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


def test_what_several_write_at_once_is_whole(tmp_path):
    path, contents = tmp_path / "private" / "program", [bytes([number]) * 200_000 for number in range(4)]

    def write_often(content):
        for _ in range(25):
            cache.write_private(path, content)
            assert cache.read_private(path) in contents

    with ThreadPoolExecutor(len(contents)) as writers:
        list(writers.map(write_often, contents))
    assert [*path.parent.iterdir()] == [path]


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


def test_switched_off_nothing_is_found_and_nothing_waits(folder, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "0")
    monkeypatch.setattr("millstream.lower.kept.program_files.file_lock", fail_with(errno.EDEADLK))
    monkeypatch.setattr(compiling, "compile_fx", compile_fx)
    monkeypatch.setattr(lower_graph, "compile_fx_inner", refuse)
    with lowered_anew():
        take_steps()


def fail_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_program_in_a_read_only_folder_is_found(kept, folder, monkeypatch):
    for module, name in ((os, "utime"), (os, "mkdir"), (Path, "write_bytes")):
        monkeypatch.setattr(module, name, fail_with(errno.EROFS))
    assert same(take_steps(), kept[1])


def test_files_that_go_meanwhile_are_missed(folder, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", fail_with(errno.ENOENT))
    with lowered_anew():
        take_steps()


def test_full_disk_costs_only_time(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "replace", fail_with(errno.ENOSPC))
    assert same(take_steps(), kept[1])
    assert not cache.list_files()


@pytest.mark.parametrize("dynamic", [False, True])
def test_model_is_found_forward_and_backward(tmp_path, monkeypatch, dynamic):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))

    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(2.0)
        result = ms.compile(model, strict=True, dynamic=dynamic)(torch.ones(4, 3), torch.ones(4, 2))
        result.sum().backward()
        return result.detach(), model.linear.weight.grad

    first = run()
    monkeypatch.setattr(lower_graph, "compile_fx_inner", refuse)
    assert same(run(), first)


def test_model_is_found_whose_stride_became_a_number(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    model, rows = Net(2.0), torch.randn(4, 9)

    def run():
        torch._dynamo.reset()
        compiled = ms.compile(model, strict=True)
        return [compiled(x, torch.ones(4, 2)).detach() for x in (rows[:, :3], rows[:, :3].contiguous())]

    first = run()
    monkeypatch.setattr(lower_graph, "compile_fx_inner", refuse)
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


def test_any_device_of_a_kind_finds_what_another_one_made(monkeypatch):
    def settings(name, uuid, visible):
        told = f"_CudaDeviceProperties(name={name!r}, major=9, uuid={uuid}, pci_bus_id={visible}, L2_cache_size=60MB)"
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return list(key.describe_settings({}))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert settings("H100", "a-1", "0") == settings("H100", "b-2", "3") != settings("H200", "a-1", "0")


@pytest.mark.parametrize("has_lowered", [True, False])
def test_one_process_lowers_and_others_wait(kept, folder, monkeypatch, has_lowered):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(compiling, "compile_fx", compile_fx)
    locks = []

    def note_locks(*args, **kwargs):
        locks.extend(folder.glob("*.lock"))
        refuse()

    monkeypatch.setattr(lower_graph, "compile_fx_inner", note_locks)
    programs = {path: path.read_bytes() for path in folder.iterdir()}
    for path in programs:
        path.unlink()
    is_waiting = threading.Event()
    waits = {"sleep": lambda _: is_waiting.set()}  # here alone: a trace sleeps, too
    monkeypatch.setattr(cache, "time", types.SimpleNamespace(**{**vars(time), **waits}))
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        for path in programs:  # each open file has its own lock, as those of two processes
            fcntl.flock(stack.enter_context(path.with_suffix(".lock").open("a")), fcntl.LOCK_EX)
        waiting = pool.submit(take_steps)
        assert is_waiting.wait(HANG_S)
        assert not waiting.done()
        for path, content in programs.items() if has_lowered else ():
            cache.write_private(path, content)
        stack.close()  # also where the other process has died
        with contextlib.nullcontext() if has_lowered else lowered_anew():
            assert same(waiting.result(HANG_S), kept[1])
    assert len(locks) < len(programs), "what the other process did not leave is lowered by all at once"


def test_who_is_kept_waiting_for_too_long_lowers(kept, folder, monkeypatch):
    monkeypatch.setattr(compiling, "compile_fx", compile_fx)
    monkeypatch.setattr(lower_graph, "compile_fx_inner", refuse)
    monkeypatch.setattr("millstream.lower.kept.program_files.PATIENCE_S", 0.05)
    fcntl = pytest.importorskip("fcntl")
    with contextlib.ExitStack() as stack:
        for path in list(folder.iterdir()):
            path.unlink()
            fcntl.flock(stack.enter_context(path.with_suffix(".lock").open("a")), fcntl.LOCK_EX)
        with lowered_anew():
            take_steps()
