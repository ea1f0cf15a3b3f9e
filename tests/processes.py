"""Programs: in this process, or in processes of their own, in which nothing has run yet or which end in some way."""

import os
import runpy
import shutil
import subprocess
import sys
import textwrap
import warnings

import torch

from millstream import FallbackWarning, _native
from millstream.cache import cache_folder
from tests.clocks import HANG_S


def run_here(path, *arguments):
    """Run a script that may not fall back, with nothing compiled before, and return its names.

    A process of its own would import PyTorch and set up the compiler anew, which takes longer than most scripts.
    """
    torch._dynamo.reset()
    before = sys.argv
    sys.argv = [str(path), *map(str, arguments)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("error", FallbackWarning)
            return runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def run_python(program, flags=(), *, timeout=HANG_S, **options):
    """Run a program that finds what this process finds, and return how it ended."""
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )


def output_of(program, *, timeout=180):
    """Run a program that is to succeed, and return what it printed."""
    done = run_python(program, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bring_compiled_code(folder):
    """Put the library's compiled code into a new cache folder: there it would be compiled once more, for seconds."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in filter(None, map(_native.find, _native.NAMES)):
        if path.parent == cache_folder():
            shutil.copy2(path, folder)
