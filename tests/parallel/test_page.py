"""The page about data parallelism: its program, as torchrun runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from millstream.errors import FallbackWarning
from tests.clocks import HANG_S

PAGE = Path(__file__).parents[2] / "docs" / "data_parallel.md"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_program_of_the_page_runs_in_two_processes_without_fallback(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    program, *_pieces = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "train.py"
    strict = f"import warnings; from {FallbackWarning.__module__} import FallbackWarning\n"
    strict += "warnings.simplefilter('error', FallbackWarning)\n"
    script.write_text(strict + program + "assert len(train_step.graphs) == 1\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch") == 2
