"""What a type checker makes of the public interface: users' functions keep their types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

USE = """
from typing import Any, assert_type
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
import millstream as ms
from millstream.data import Feed

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

class Pairs(Dataset[tuple[Tensor, Tensor]]): ...

loader = DataLoader(Pairs(), batch_size=4)
assert_type(ms.feed(loader, "cpu"), Feed[tuple[Tensor, Tensor]])
for images, labels in ms.feed(loader, "cpu", 3, pad_last=True):
    assert_type(labels, Tensor)
with ms.feed([{"x": torch.ones(1)}], torch.device("cpu")) as fed:
    for batch in fed: assert_type(batch, dict[str, Tensor])
    fed.stats().no_such_share  # wrong

def number_of() -> int: return 1
def first(batch: tuple[Tensor, Tensor]) -> Tensor: return batch[0]

assert_type(ms.feed(loader, "cpu", transform=first), Feed[Tensor])
for image in ms.feed(loader, "cpu"): step(image, image)  # wrong
ms.feed(loader, "cpu", transform=3)  # wrong
ms.feed(loader, "cpu", pad_last=True, batch_size=3)  # wrong
ms.feed("cpu", loader)  # wrong

assert_type(ms.fetch({"loss": torch.ones(1)}).result(), dict[str, Any])
assert_type(ms.fetch([torch.ones(1)], step=3).result(), list[Any])
assert_type(ms.fetch(1.5).result(), float)
mean: float = ms.fetch(torch.ones(())).result()
text: str = ms.fetch(1.5).result()  # wrong
ms.fetch(torch.ones(1), callback=3)  # wrong

async def wait() -> list[Any]: return await ms.fetch([torch.ones(1)])

with ms.streams(2) as s:
    assert_type(s[1].mm(torch.ones(1, 1), torch.ones(1, 1)), Tensor)
    assert_type(s[0](f, torch.ones(1), 3), Tensor)
    assert_type(s.run([number_of, number_of]), list[int])
    values, indices = s[1].max(torch.ones(1), 0)
    with s[1]: s.join()
    s[1].mm(torch.ones(1, 1), 3)  # wrong
    s[1](f, torch.ones(1))  # wrong
    s.run(3)  # wrong
with ms.profile() as profile: profile.save("why.html")
profile.save(3)  # wrong
ms.explain(other).no_such_attribute  # wrong
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
