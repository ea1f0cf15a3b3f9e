"""Programs on disk, on a GPU: what is found has the kernels and the bits of what was lowered."""

import pytest
import torch
from torch import nn

import millstream as ms
import millstream.lower.compile as compiling
from millstream import api
from tests.processes import output_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _warm(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")


def refuse(*_, **__):
    raise AssertionError("lowered again")


def names(compiled):
    return [kernel.name for executable in api.executables(compiled) for kernel in executable.plan.graph.kernels]


@pytest.mark.own_kernels
def test_model_with_own_kernels_is_found(monkeypatch):
    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers).half().cuda().eval().to(memory_format=torch.channels_last)
        image = torch.randn(1, 16, 16, 16, device="cuda", dtype=torch.half)
        compiled = ms.compile(model, strict=True)
        with torch.no_grad():
            results = [compiled(image.to(memory_format=torch.channels_last)).clone() for _ in range(3)]
        return results, names(compiled)

    results, kernels = run()
    assert any(name.startswith("convolve_2d") for name in kernels)
    monkeypatch.setattr("millstream.lower.lower_graph.compile_fx_inner", refuse)
    again, same_kernels = run()
    assert same_kernels == kernels
    assert all(map(torch.equal, again, results))


def test_step_is_found(monkeypatch):
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def train(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ms.step(train, strict=True)
        x = torch.randn(16, 64, device="cuda")
        losses = [step(x).item() for _ in range(4)]
        return losses, names(step)

    first = run()
    monkeypatch.setattr(compiling, "compile_fx", refuse)
    assert run() == first


TRAVELLING = """
import torch
import millstream as ms

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())

@ms.step(strict=True)
def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def take_steps():
    print([train(torch.ones(32, 64, device="cuda")).item() for _ in range(4)])
"""


def test_what_travels_is_not_compiled_again(tmp_path, monkeypatch):
    """Triton's cache gets nothing new; the process after that finds kernels without asking Triton."""
    file = str(tmp_path / "run.msc")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)  # which PyTorch sets where a kernel was compiled before

    def run(machine, program):
        monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / machine / "own"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine / "inductor"))
        return output_of(TRAVELLING + program).strip()

    def kernels():
        return sorted(path.name for path in (tmp_path / "here" / "inductor" / "triton").glob("*/*/*.cubin"))

    expected = run("there", f"take_steps()\nassert ms.save_programs({file!r})")
    run("here", f"assert ms.load_programs({file!r})")
    imported = kernels()
    assert run("here", "take_steps()") == expected
    assert kernels() == imported
    assert imported
    assert run("here", "take_steps()") == expected
