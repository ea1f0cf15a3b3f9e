"""Programs in processes of their own: in which nothing has run yet, or which end in some way."""

import os
import subprocess
import sys
import textwrap


def run_python(program, flags=(), *, timeout=120, **options):
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
