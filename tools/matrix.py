"""Try a wheel in empty environments: every Python there is, with every supported PyTorch of which there is a CPU build.

A pair is tried with the README's program and with ``millstream doctor``. CUDA builds are gigabytes and are left
alone, unless ``--with`` names an interpreter that has one: its packages serve the pair of its versions. Else a pair
without a CPU build for this machine counts as not tried. Prints a table for ``docs/install.md``; the exit code is 1 if
a pair that was tried failed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.1", "2.13.0")
LIMIT_S = 900.0  # for one command: downloads included


_ASK = """
import importlib.metadata, sys, sysconfig
print("%d.%d" % sys.version_info[:2], importlib.metadata.version("torch").partition("+")[0])
print(sysconfig.get_path("purelib"))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="given", action="append", default=[], help="an interpreter that has PyTorch")
    given = dict(map(ask_interpreter, parser.parse_args().given))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "readme.py").write_text(readme_program(), encoding="utf-8")
        for python in PYTHONS:
            for torch in TORCHES:
                results[python, torch] = outcome = attempt(python, torch, work, given.get((python, torch)))
                print(f"Python {python}, PyTorch {torch}: {outcome}", flush=True)
    print("\n| Python | PyTorch | |\n|---|---|---|")
    for (python, torch), outcome in results.items():
        print(f"| {python} | {torch} | {outcome} |")
    return int(any(outcome.startswith("failed") for outcome in results.values()))


def ask_interpreter(interpreter: str) -> tuple[tuple[str, str], str]:
    """The versions of Python and PyTorch that an interpreter has, and the folder of its packages."""
    versions, folder = run([interpreter, "-c", _ASK]).splitlines()
    python, torch = versions.split()
    return (python, torch), folder


def attempt(python: str, torch: str, work: Path, packages: str | None) -> str:
    """Try one pair in an environment of its own; say in a few words what came of it.

    Args:
        python: Version of Python.
        torch: Version of PyTorch.
        work: Where to.
        packages: A folder in which this PyTorch lies; ``None`` to install a CPU build.
    """
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or not works(interpreter):
        return "not tried: no such Python here"
    place = work / f"{python}-{torch}"
    binary = place / "bin" / "python"
    try:
        run([interpreter, "-m", "venv", str(place)])
        if packages is not None:
            (place / "lib" / f"python{python}" / "site-packages" / "given.pth").write_text(f"{packages}\n")
        else:
            try:
                run([str(binary), "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"torch=={torch}+cpu"])
            except subprocess.CalledProcessError:
                return "not tried: no CPU build here"
        run([str(binary), "-m", "pip", "install", "--quiet", str(ROOT)])  # by way of a wheel
        run([str(binary), str(work / "readme.py")], cwd=work)
        run([str(binary), "-m", "millstream", "doctor"], cwd=work)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()
        return f"failed: {lines[-1][:200] if lines else error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return "README's program and doctor pass"


def works(interpreter: str) -> bool:
    """Whether it runs: a version manager's stub may stand for a Python that is not installed."""
    return subprocess.run([interpreter, "--version"], capture_output=True, check=False).returncode == 0


def run(command: list[str], cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout


def readme_program() -> str:
    """The first program of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
