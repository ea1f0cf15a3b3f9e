"""On a GPU: runs from one seed are the same to the bit, however often the kernels are compiled and tuned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import millstream as ms
from tests import networks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


def train(count=12):
    """Train a small network by a step of its own; return what came out."""
    torch.manual_seed(1)
    model = networks.Mlp().cuda()
    optimizer = torch.optim.Adam(model.parameters())

    @ms.step(strict=True)
    def step(x, y):
        return networks.train_once(model, optimizer, x, y)

    batches = [[tensor.cuda() for tensor in networks.example(networks.Mlp)] for _ in range(count)]
    losses = [step(*batch) for batch in batches]
    return [*losses, *model.parameters(), *networks.optimizer_state(optimizer)]


def test_a_step_that_is_compiled_again_gives_the_same_bits():
    first = train()
    for _ in range(8):
        for one, other in zip(first, train(), strict=True):
            assert torch.equal(one, other)


SCRIPT = """
import hashlib
from tests.gpu.test_tuning import train
digest = hashlib.sha256()
for tensor in train():
    digest.update(tensor.detach().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_another_process_gives_the_same_bits(tmp_path):
    """Also where upstream has forgotten what it found."""
    found = set()
    for name in ("first", "second", "third"):
        folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name), "MILLSTREAM_CACHE_DIR": str(tmp_path / "ours")}
        environment = {**os.environ, **folders, "PYTHONPATH": os.pathsep.join(["src", "."])}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found.add(done.stdout.split()[-1])
    assert len(found) == 1
