"""What a wheel brings is used where there is no compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
from millstream import _native
from millstream.capture.record.interpreter import instructions
from millstream.device import copying
print(_native.load("core").__file__, instructions.why_not() == "", copying.filler() is not None)
print(_native.why_not("core"))
assert _native.load("tensors") is None and _native.why_not("tensors") == "there is no compiler"
"""


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_a_wheel_needs_no_compiler(tmp_path):
    pytest.importorskip("hatchling")
    build = "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    others = {"PATH": "", "CXX": "", "PYTHONPATH": str(tmp_path / "site"), "MILLSTREAM_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(run, env=os.environ | others, capture_output=True, text=True, check=True).stdout.split()
    assert Path(said[0]).parent == tmp_path / "site/millstream/_native"
    assert said[1:] == ["True", "True"]
