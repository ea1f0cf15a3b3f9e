"""On a GPU: runs from one seed are the same to the bit, however often the kernels are compiled and tuned."""

import json
import os
import shutil
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
from tests.gpu.engines.test_tuning import train
digest = hashlib.sha256()
for tensor in train():
    digest.update(tensor.detach().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def run_script(script, upstream, ours):
    """Run a program with these caches, and return the last line that it printed."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(upstream), "MILLSTREAM_CACHE_DIR": str(ours)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **folders, "PYTHONPATH": os.pathsep.join(["src", "."])},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_another_process_gives_the_same_bits(tmp_path):
    """Also where upstream has forgotten what it found."""
    assert len({run_script(SCRIPT, tmp_path / name, tmp_path / "ours") for name in ("first", "second", "third")}) == 1


TAKEN = """
import json
from millstream.lower.inductor import generated_kernels, tuning
from tests.gpu.engines.test_tuning import train
tuners, keep = [], generated_kernels.keep_choice
generated_kernels.keep_choice = lambda tuner, source: (keep(tuner, source), tuners.append(tuner))
train(3)
print(json.dumps([tuning._describe(launcher.config) for tuner in tuners for launcher in tuner.launchers]))
"""


def test_what_was_found_here_goes_before_what_upstream_remembers(tmp_path):
    """It may have been told by others since."""
    upstream, ours = tmp_path / "upstream", tmp_path / "ours"
    run_script(TAKEN, upstream, ours)
    files = list((ours / "tuning").iterdir())
    assert files
    changed = []
    for file in files:
        choice = json.loads(file.read_text())
        choice["num_warps"] = 2 if choice["num_warps"] > 2 else 4
        changed.append(choice)
        file.write_text(json.dumps(choice))
    taken = json.loads(run_script(TAKEN, upstream, ours))
    assert all(choice in taken for choice in changed)
    # And where nothing was found here, what upstream remembers is noted.
    shutil.rmtree(ours)
    run_script(TAKEN, upstream, ours)
    assert len(list((ours / "tuning").iterdir())) == len(files)
