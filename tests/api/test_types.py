"""What a type checker makes of the public interface: users' functions keep their types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

USE = """
from typing import assert_type
import torch
from torch import Tensor, nn
import millstream as ms

class Net(nn.Module):
    def predict(self) -> int: return 1

net = ms.compile(Net(), freeze=True, streams=2)
assert_type(net, Net)
number: int = net.predict()

@ms.compile
def f(x: Tensor, k: int) -> Tensor: return x * k

assert_type(f(torch.ones(1), 2), Tensor)
f("no", 3)  # wrong
f(torch.ones(1), 2, colour=3)  # wrong

@ms.compile(strict=True)
def g(x: Tensor) -> Tensor: return x

assert_type(g(torch.ones(1)), Tensor)

@ms.step
def step(x: Tensor, y: Tensor) -> Tensor: return x

assert_type(step(torch.ones(1), torch.ones(1)), Tensor)
step(1, torch.ones(1))  # wrong

@ms.step(strict=True, max_graphs=2, streams="auto")
def other(x: Tensor) -> tuple[Tensor, int]: return x, 1

assert_type(other(torch.ones(1)), tuple[Tensor, int])
other()  # wrong
ms.compile(net, colour=1)  # wrong
ms.step(step, freeze=True)  # wrong
assert_type(other, Tensor)  # wrong
step(torch.ones(1))  # wrong
step(torch.ones(1), y="text")  # wrong
ms.step(step, mode="reduce-overhead")  # wrong
ms.step(step, max_graphs="many")  # wrong
ms.compile(net, shard_optimizer=True)  # wrong
ms.feed([torch.ones(1)])  # wrong
ms.feed([torch.ones(1)], "cpu", depth="two")  # wrong

class Trainer:
    @ms.step
    def train(self, x: Tensor, scale: float = 1.0) -> Tensor: return x * scale

    @ms.step(strict=True)
    def two(self, x: Tensor) -> tuple[Tensor, int]: return x, 1

trainer = Trainer()
assert_type(trainer.train(torch.ones(1), scale=2.0), Tensor)
assert_type(trainer.two(torch.ones(1)), tuple[Tensor, int])
assert_type(Trainer.train(trainer, torch.ones(1)), Tensor)
trainer.train(torch.ones(1)).no_such_method()  # wrong
"""


def test_compiled_functions_and_steps_keep_their_types(tmp_path):
    pytest.importorskip("pyrefly")
    (tmp_path / "use.py").write_text(USE)
    source = Path(__file__).parents[2] / "src"
    (tmp_path / "pyrefly.toml").write_text(
        f'project-includes = ["use.py"]\npython-interpreter-path = "{sys.executable}"\nsearch-path = ["{source}"]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyrefly", "check"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = {int(line) for line in re.findall(r"use\.py:(\d+)", done.stdout)}
    wrong = {number for number, line in enumerate(USE.splitlines(), start=1) if "# wrong" in line}
    assert found == wrong, done.stdout + done.stderr
